"""The tokenizer: a Hugging Face tokenizer directory, checked before anything is built on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, EnvironmentFault, one_line, shorten
from megatron_rl.json_text import parse_json
from megatron_rl.types import Message, Prompt

_SPOKEN = "THEMODELSTURN"
"""Stands for what the model said while a template is rendered; templates strip and split, so no spaces."""


class Tokenizer:
    """Text to token ids and back, with the end-of-text token the policy is trained to emit."""

    def __init__(self, backend: Any, name: str) -> None:
        if backend.eos_token_id is None:
            raise ConfigError([
                f"tokenizer {name!r} has no end-of-text token, so no answer could ever end; "
                'set "eos_token" in its tokenizer_config.json'
            ])
        self._backend = backend
        self.name = name
        self.end_token_id: int = int(backend.eos_token_id)
        self.vocab_size: int = max(len(backend), self.end_token_id + 1)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; no special tokens are added."""
        return self._backend.encode(text, add_special_tokens=False)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt; chat messages go through the tokenizer's chat template."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        return self.encode(self.render(prompt))

    def encode_reply(self, prompt: Prompt, messages: Sequence[Message], ended: bool) -> list[int]:
        """Ids that follow a turn of the model: ``messages``, and the beginning of its next turn.

        The model's own tokens are never encoded again. For a plain-text ``prompt`` the messages' contents follow
        as they are; in a chat the template's text after the model's turn does. ``ended`` says that the turn
        closes with the end-of-text token, which is then not repeated.

        Raises:
            EnvironmentFault: the chat template refuses the messages, or rewrites what the model said.
        """
        if isinstance(prompt, str):
            return self.encode("".join(message["content"] for message in messages))
        conversation = [*prompt, {"role": "assistant", "content": _SPOKEN}, *messages]
        try:
            rendered = self.render(conversation)
        except Exception as error:  # a template raises whatever its author chose
            roles = ", ".join(message["role"] for message in messages)
            raise EnvironmentFault(f"the chat template cannot render a reply of {roles}: {error}") from error
        before, *after = rendered.split(_SPOKEN)
        if len(after) != 1:
            raise EnvironmentFault(f"the chat template shows a turn of the model {len(after)} times; once is needed")
        return self.encode(after[0].removeprefix(self.decode_token(self.end_token_id)) if ended else after[0])

    def render(self, messages: Sequence[Message]) -> str:
        """Text of chat messages and of the beginning of the next turn; raises what the template raises."""
        return self._backend.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )

    @property
    def has_chat_template(self) -> bool:
        """True when chat prompts can be rendered."""
        return bool(self._backend.chat_template)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return self._backend.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def decode_token(self, token_id: int) -> str:
        """Text of a single token, special tokens by name; for reports."""
        return self._backend.decode([token_id], clean_up_tokenization_spaces=False)


def load_tokenizer(path: str) -> Tokenizer:
    """Load `--tokenizer-model`: a local directory or a name in the local hub cache.

    Raises:
        ConfigError: nothing usable is there, or it has no end-of-text token.
    """
    if Path(path).is_dir():
        _check_settings(path)
    from transformers import AutoTokenizer  # seconds of import, needed only here

    try:
        backend = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for files that somebody else wrote
        reason = one_line(str(error), 300) or type(error).__name__
        raise ConfigError([
            f"--tokenizer-model {path!r} cannot be loaded ({reason}); give a directory with "
            "tokenizer.json and tokenizer_config.json, or a hub name when online"
        ]) from error
    return Tokenizer(backend, path)


def _check_settings(directory: str) -> None:
    try:
        settings = parse_json((Path(directory) / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([
            f"--tokenizer-model {directory!r} holds no tokenizer_config.json; "
            "give a Hugging Face tokenizer directory"
        ]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([
            f"--tokenizer-model {directory!r}: tokenizer_config.json is not JSON ({error}); "
            "take the file the tokenizer was published with"
        ]) from error
    if not isinstance(settings, dict):
        raise ConfigError([
            f"--tokenizer-model {directory!r}: tokenizer_config.json is {shorten(settings)} where a mapping of "
            "settings belongs; take the file the tokenizer was published with"
        ])
