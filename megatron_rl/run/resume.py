"""What a run that goes on compares with its checkpoint: its flags, of which it reports changes, and its chats.

Chats that become other prompts are refused: with another template the run would go on as another task.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.rl_config import RLConfig, all_flags, to_dict
from megatron_rl.errors import CheckpointError
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Prompt

_OF_A_START = ("checkpoint", "logging")
"""Sections that say where a start reads and writes."""
_FILES_OF_FLAGS = ("config", "hf_config")
"""Files that give values to other flags."""
_NAMES = {
    "template": "chat template",
    "template_kwargs": "chat template kwargs",
    "system_prompt": "system prompt",
    "tools": "list of tools",
    "tool_call_parser": "parser of tool calls",
}

logger = logging.getLogger(__name__)


class Settings:
    """Settings by field name; a file, such as the environment list, by its checksum as the run began."""

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self._files: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        sections = [section for name, section in to_dict(config).items() if name not in _OF_A_START]
        values = {name: value for section in sections for name, value in section.items()}
        for flag in all_flags():
            value = values.get(flag.name)
            if flag.path and value is not None and os.path.isfile(value):
                self._files[flag.name] = value = hashlib.sha256(Path(value).read_bytes()).hexdigest()
            elif flag.path and value is not None and os.path.exists(value):
                value = os.path.realpath(value)
            if flag.name in values and flag.name not in _FILES_OF_FLAGS:
                self._values[flag.name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Say what was another when ``state`` was saved; this start's values hold."""
        changed = []
        for flag in all_flags():
            known = flag.name in state and flag.name in self._values
            if known and state[flag.name] != self._values[flag.name]:
                before = "other content" if flag.name in self._files else flag.typed(state[flag.name])
                changed.append(f"{flag.typed(self._config.value(flag.name))} (was {before})")
        if changed:
            logger.info("changed since the checkpoint: %s", ", ".join(changed))


class PromptFormats:
    """The way in which chats of the environments that are trained on become prompts."""

    def __init__(self, tokenizer: Tokenizer, prompts: Iterable[tuple[str, Prompt]]) -> None:
        """``prompts`` with the names of their environments; those that are plain text have no format."""
        names = {environment for environment, prompt in prompts if not isinstance(prompt, str)}
        self._tokenizer = tokenizer
        self._found = {name: tokenizer.chat_format(name).fingerprints() for name in sorted(names)}
        for name in names:
            if tokenizer.chat_format(name).tools:
                self._found[name]["tool_call_parser"] = parser = tokenizer.tool_call_parser(name)
                logger.info("%s: calls of its tools are read by the parser %s", name, parser)

    def warn_of_open_ends(self, end_ids: Collection[int]) -> None:
        """Warn where a chat template closes a turn with a token that ends no answer: it would go on to its limit.

        So it is with base models: the end token is that of texts, and the template has one of turns.
        """
        for name in self._found:
            closing = self._tokenizer.closing_token(name)
            if closing is not None and self._tokenizer.special_tokens[closing] not in end_ids:
                logger.warning(
                    "%s: the chat template closes a turn with %s, which ends no answer here; if the model writes it, "
                    "add --rl-stop-strings '%s'", name, closing, closing,
                )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return environment -> setting -> digest."""
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
