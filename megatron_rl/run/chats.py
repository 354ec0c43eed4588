"""What a resume compares of chats: another template would go on as another task."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.run.generation import stop_strings
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)

_NAMES = {
    "template": "chat template",
    "template_kwargs": "chat template kwargs",
    "system_prompt": "system prompt",
    "tools": "list of tools",
    "tool_call_parser": "parser of tool calls",
}


class PromptFormats:
    """How the chats of the environments that are trained on become prompts."""

    def __init__(self, tokenizer: Tokenizer, prompts: Iterable[tuple[str, Prompt]]) -> None:
        """``prompts`` with the names of their environments; those that are plain text have no format."""
        names = {environment for environment, prompt in prompts if not isinstance(prompt, str)}
        self._tokenizer = tokenizer
        self._found = {name: tokenizer.chat_format(name).fingerprints() for name in sorted(names)}
        for name in names:
            if tokenizer.chat_format(name).tools:
                self._found[name]["tool_call_parser"] = parser = tokenizer.tool_call_parser(name)
                logger.info("%s: calls of its tools are read by the parser %s", name, parser)

    def warn_of_open_ends(self, config: RLConfig) -> None:
        """Tell where a chat model's turn closes with a token that ends no answer: it would go on to its limit.

        So it is with base models: the end token is that of texts, and the template has one of turns.
        """
        tokenizer = self._tokenizer
        ends = {*tokenizer.end_token_ids, *stop_strings(config, tokenizer)[0]}
        for name in self._found:
            closing = tokenizer.closing_token(name)
            if closing is not None and tokenizer.special_tokens[closing] not in ends:
                logger.warning(
                    "%s: the chat template closes a turn with %s, which ends no answer here; if the model writes it, "
                    "add --rl-stop-strings '%s'", name, closing, closing,
                )  # fmt: skip

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
            changed = [what for name, what in _NAMES.items() if found.get(name) != saved.get(name)]
            if changed:
                raise CheckpointError(
                    f"the chats of {environment!r} have another {' and '.join(changed)} than when the run began; "
                    "use the same, or begin a new run with --load and --finetune"
                )
