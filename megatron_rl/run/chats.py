"""What a resume compares of chats: another template would go on as another task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.errors import CheckpointError
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Prompt

_NAMES = {"template": "chat template", "template_kwargs": "chat template kwargs", "system_prompt": "system prompt"}


class PromptFormats:
    """Fingerprints of how the chats of the environments that are trained on become prompts."""

    def __init__(self, tokenizer: Tokenizer, prompts: Iterable[tuple[str, Prompt]]) -> None:
        """``prompts`` with the names of their environments; those that are plain text have no format."""
        names = {environment for environment, prompt in prompts if not isinstance(prompt, str)}
        self._found = {name: tokenizer.chat_format(name).fingerprints() for name in sorted(names)}

    def state_dict(self) -> dict[str, Any]:
        """Environment -> setting -> digest."""
        return self._found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare; environments that came or went since are left out.

        Raises:
            CheckpointError: the chats of an environment became other prompts when the run began.
        """
        for environment in self._found.keys() & state.keys():
            found, saved = self._found[environment], state[environment]
            changed = [_NAMES[name] for name in found if found[name] != saved[name]]
            if changed:
                raise CheckpointError(
                    f"the chats of {environment!r} have another {' and '.join(changed)} than when the run began; "
                    "use the same, or begin a new run with --load and --finetune"
                )
