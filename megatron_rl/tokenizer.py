"""The tokenizer: a Hugging Face tokenizer directory, checked before anything is built on it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.chat import ChatFormat, refusal
from megatron_rl.environments.tool_calls import parser_for
from megatron_rl.errors import ChatRefused, ConfigError, TextTooLong, one_line, shorten
from megatron_rl.families import model_directory
from megatron_rl.families.gguf import SUFFIX as GGUF
from megatron_rl.families.hf_config import end_token_ids, read_object
from megatron_rl.registry import PARSERS
from megatron_rl.types import Message, Prompt

Tools = Sequence[Mapping[str, Any]]
MOST_TOKENS = 100_000_000
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPOKEN = "THEMODELSTURN"
"""Stands for what the model said while a template is rendered; templates strip and split, so no spaces."""


class Tokenizer:
    """Text to token ids and back, with the end-of-text tokens the policy may emit."""

    def __init__(self, backend: Any, name: str, more_end_token_ids: Iterable[int] = ()) -> None:
        """``more_end_token_ids`` end an answer too; those that are ordinary words here do not."""
        if backend.eos_token_id is None:
            raise ConfigError([
                f"tokenizer {name!r} has no end-of-text token, so no answer could ever end; "
                'set "eos_token" in its tokenizer_config.json'
            ])
        self._backend = backend
        self.name = name
        self.end_token_id: int = int(backend.eos_token_id)
        """The one that closes a demonstration."""
        # Ids may have holes: `len` counts tokens, and an id beyond it would be no row of the embedding.
        self.vocab_size: int = 1 + max([len(backend) - 1, self.end_token_id, *backend.get_vocab().values()])
        if self.vocab_size > MOST_TOKENS:
            raise ConfigError([
                f"tokenizer {name!r} has the token id {self.vocab_size - 1:,}, and no vocabulary is that large"
            ])
        more = [number for number in dict.fromkeys(more_end_token_ids) if number != self.end_token_id]
        known = set(self.special_tokens.values()) if more else set()
        self.end_token_ids: tuple[int, ...] = (self.end_token_id, *(number for number in more if number in known))
        """All that end an answer, `end_token_id` first."""
        self.passed_over: tuple[int, ...] = tuple(number for number in more if number not in known)
        """Ids to end at that are ordinary words: a ``config.json`` may have the default of its class."""
        self._chat: ChatFormat = ChatFormat()
        self._chats: Mapping[str, ChatFormat] = {}
        self._most: tuple[int, int] | None = None
        self._for_grammars: list[Any] = []  # made once for all copies with the same end tokens

    def ending_also_at(self, token_ids: Iterable[int]) -> Tokenizer:
        """Copy with further end tokens."""
        ending = Tokenizer(self._backend, self.name, (*self.end_token_ids, *self.passed_over, *token_ids))
        return ending.formatting(self._chat, self._chats)

    def formatting(
        self, chat: ChatFormat | None = None, by_environment: Mapping[str, ChatFormat] | None = None
    ) -> Tokenizer:
        """Copy with other chat settings: the run's, and those of environments by name; None keeps them."""
        formatting = copy(self)
        formatting._chat = self._chat if chat is None else chat
        formatting._chats = self._chats if by_environment is None else by_environment
        return formatting

    def with_variables(self, environment: str, template_kwargs: Mapping[str, Any]) -> Tokenizer:
        """Copy that gives the chat template of ``environment`` these variables beside its own."""
        chat = ChatFormat(template_kwargs=template_kwargs).over(self._chats.get(environment, ChatFormat()))
        return self.formatting(by_environment={**self._chats, environment: chat})

    def reading_at_most(self, tokens: int) -> Tokenizer:
        """Copy whose `encode` refuses, without encoding it, a text that ``tokens`` tokens cannot hold."""
        reading = copy(self)
        reading._most = tokens, tokens * max(map(len, self._backend.get_vocab()))
        return reading

    def chat_format(self, environment: str = "") -> ChatFormat:
        """Combine an environment's chat settings with the run's and the tokenizer's template."""
        own = self._backend.chat_template
        found = self._chats.get(environment, ChatFormat()).over(self._chat)
        return found.over(ChatFormat(own)) if isinstance(own, str) else found

    def difference(self, other: Tokenizer) -> str | None:
        """Describe which tokens ``other`` lacks or numbers otherwise; None if it has all of them."""
        own, others = self._backend.get_vocab(), other._backend.get_vocab()
        differing = [text for text, number in own.items() if others.get(text) != number]
        if not differing:
            return None
        first = min(differing, key=own.get)
        place = f"has the id {others[first]:,}" if first in others else "is none"
        return (
            f"it has {len(others):,} tokens against {len(own):,}, and {len(differing):,} of these are others there: "
            f"{shorten(first)}, id {own[first]:,}, {place}"
        )

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of all special tokens."""
        named = zip(self._backend.all_special_tokens, self._backend.all_special_ids, strict=True)
        added = self._backend.added_tokens_decoder.items()
        return {**dict(named), **{token.content: number for number, token in added if token.special}}

    @property
    def unsplit_tokens(self) -> dict[str, int]:
        """Text -> id of all tokens that are found before a text is split: special ones, and Qwen's ``<tool_call>``."""
        return self.special_tokens | {t.content: number for number, t in self._backend.added_tokens_decoder.items()}

    @cached_property
    def _beginning(self) -> list[int]:
        """The beginning-of-text token, if the tokenizer puts one before plain text."""
        bos = getattr(self._backend, "bos_token_id", None)
        if bos is None:
            return []
        return [bos] if self._backend.encode("a", add_special_tokens=True)[:1] == [bos] else []

    def encode(self, text: str) -> list[int]:
        """Encode plain text without special tokens; raises ``ConfigError`` if it cannot, or ``TextTooLong``."""
        if self._most is not None and len(text) > self._most[1]:
            raise TextTooLong(f"{len(text):,} characters, and {self._most[0]:,} tokens have at most {self._most[1]:,}")
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raises a plain Exception where neither text nor [UNK] is a token
            raise ConfigError([
                f"tokenizer {self.name!r} cannot encode {shorten(text)} ({one_line(str(error), 200)}); use one whose "
                "vocabulary covers the environment's texts"
            ]) from error

    def encode_prompt(self, prompt: Prompt, environment: str = "", tools: Tools | None = None) -> list[int]:
        """Encode a prompt of ``environment``; ``tools`` as in `render`, as is ``ChatRefused``.

        A chat template writes all special tokens; plain text gets the beginning-of-text token unless it has it.
        """
        if not isinstance(prompt, str):
            return self.encode(self.render(prompt, environment, tools))
        ids = self.encode(prompt)
        return ids if ids[:1] == self._beginning else self._beginning + ids

    def encode_reply(
        self, prompt: Prompt, messages: Sequence[Message], ended: bool, environment: str = "",
        tools: Tools | None = None,
    ) -> list[int]:  # fmt: skip
        """Encode what follows a turn of the model: ``messages``, and the beginning of its next turn.

        The model's own tokens are never encoded again. After a plain-text ``prompt`` the messages' contents follow as
        they are; in a chat what the template writes after the model's turn. If the turn ``ended`` with an end token,
        the template's own is left out.

        Raises:
            ChatRefused: the chat template refuses the messages, or rewrites what the model said.
        """
        if isinstance(prompt, str):
            return self.encode("".join(message["content"] for message in messages))
        turn, rest = {"role": "assistant", "content": _SPOKEN}, ""
        if messages and messages[0]["role"] == "tool" and (parser := self.tool_call_parser(environment)):
            turn, rest = PARSERS.get(parser).turn(_SPOKEN, messages[0])
        before, *after = self.render([*prompt, turn, *messages], environment, tools).split(_SPOKEN)
        if len(after) != 1:
            raise ChatRefused(f"the chat template shows a turn of the model {len(after)} times; once is needed")
        reply = after[0].removeprefix(rest)
        return self.encode(self.without_end_token(reply) if ended else reply)

    def without_end_token(self, text: str) -> str:
        """Remove an end token at the beginning of ``text``."""
        for end in (self.decode_raw([number]) for number in self.end_token_ids):
            if text.startswith(end):
                return text.removeprefix(end)
        return text

    def render(self, messages: Sequence[Message], environment: str = "", tools: Tools | None = None) -> str:
        """Render chat messages and the beginning of the next turn; ``ChatRefused`` if the template raises something.

        ``tools`` are schemas as in OpenAI's API; None takes those of the environment.
        """
        chat = self.chat_format(environment)
        offered = chat.tools if tools is None else tools
        apply = partial(
            self._backend.apply_chat_template,
            chat_template=chat.template,
            tools=[dict(tool) for tool in offered] or None,
            tokenize=False,
            **{"add_generation_prompt": True, **chat.template_kwargs},
        )
        try:
            with contextlib.suppress(TypeError):
                return apply(chat.conversation(messages))
            return apply(chat.conversation(messages, arguments_are_text=True))  # DeepSeek's join them to other text
        except Exception as error:  # whatever its author chose; a MemoryError is none of the device's
            raise refusal(messages, error) from error

    def ignores_tools(self, environment: str = "") -> bool:
        """Return whether its chats look the same with tools as without; ``ChatRefused`` as in `render`."""
        asked: Message = {"role": "user", "content": "a"}
        tool = {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}}
        offered = [{"type": "function", "function": tool}]
        return self.render([asked], environment, offered) == self.render([asked], environment, ())

    def closing_token(self, environment: str = "") -> str | None:
        """Find the special token that closes a turn of the model in chats of ``environment``."""
        turns = [("user", "a"), ("assistant", _SPOKEN), ("user", "b")]
        try:
            rendered = self.render([{"role": role, "content": said} for role, said in turns], environment)
        except ChatRefused:  # it is for single questions only, say
            return None
        after = rendered.partition(_SPOKEN)[2].lstrip()
        return next((text for text in self.special_tokens if text and after.startswith(text)), None)

    def has_chat_template(self, environment: str = "") -> bool:
        """Return True when chats of ``environment`` can be rendered."""
        return bool(self.chat_format(environment).template or self._backend.chat_template)

    def tool_call_parser(self, environment: str = "") -> str:
        """Name the parser of tool calls in chats of ``environment``; empty if none is known."""
        chat = self.chat_format(environment)
        if chat.tool_call_parser is not None:
            return chat.tool_call_parser
        try:
            return parser_for(self._backend.get_chat_template(chat.template, tools=[{}]))
        except ValueError:  # there is no template, or none of several is the default
            return ""

    def decode(self, token_ids: Sequence[int], calls_of: str = "", marks: Collection[str] = ()) -> str:
        """Decode without special tokens, except ``marks`` and those by which the parser ``calls_of`` reads calls."""
        left_out = self.left_out(calls_of, marks) if calls_of or marks else ()
        return self._backend.decode(
            [number for number in token_ids if number not in left_out],
            skip_special_tokens=not (marks or (calls_of and PARSERS.get(calls_of).markers)),
            clean_up_tokenization_spaces=False,
        )

    def special_in(self, texts: Sequence[str]) -> list[str]:
        """Return the special tokens that ``texts`` contain by name."""
        return [token for token in self.special_tokens if token and any(token in text for text in texts)]

    def left_out(self, calls_of: str = "", marks: Collection[str] = ()) -> frozenset[int]:
        """Return the ids that `decode` leaves out."""
        kept = (*marks, *(PARSERS.get(calls_of).markers if calls_of else ()))
        return frozenset(number for text, number in self.special_tokens.items() if text not in kept)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return self._backend.convert_ids_to_tokens(list(token_ids))

    @cached_property
    def byte_tokens(self) -> frozenset[int]:
        """Ids of ``<0x00>`` to ``<0xFF>``, several of which make a character."""
        return frozenset(number for text, number in self._backend.get_vocab().items() if _BYTE.fullmatch(text))

    @cached_property
    def _byte_letters(self) -> dict[str, int]:
        """The letters that byte-level vocabularies are written in: those that can be seen are their own bytes."""
        own = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in own]
        return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, also of one that is part of a character."""
        token = self._backend.convert_ids_to_tokens(token_id) or ""
        if _BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        text, letters = self.decode_raw([token_id]), self._byte_letters
        if "\N{REPLACEMENT CHARACTER}" in text and all(letter in letters for letter in token):
            return bytes(letters[letter] for letter in token)
        return text.encode()

    def for_grammars(self) -> Any:
        """Return this vocabulary as llguidance's ``LLTokenizer``; takes a second, the first time.

        Raises:
            ConfigError: llguidance cannot read it.
        """
        from llguidance.hf import from_tokenizer

        try:
            if not self._for_grammars:
                self._for_grammars.append(from_tokenizer(self._backend, self.vocab_size, list(self.end_token_ids)))
            return self._for_grammars[0]
        except Exception as error:  # it raises whatever its Rust part meets
            reason = one_line(str(error), 200)
            raise ConfigError([f"llguidance cannot read tokenizer {self.name!r}: {reason}"]) from error

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens by name, for records."""
        return self._backend.decode(list(token_ids), clean_up_tokenization_spaces=False)


def load_tokenizer(path: str, model_directories: Iterable[str] = ()) -> Tokenizer:
    """Load `--tokenizer-model`, a local directory or a name in the hub cache; ``ConfigError`` if it cannot be used.

    ``config.json`` and ``generation_config.json`` there, and in ``model_directories``, may name more end tokens.
    """
    path = str(model_directory(path)) if path.endswith(GGUF) else path
    named = f"--tokenizer-model {path!r}"
    if Path(path).is_dir():
        read_object(Path(path) / "tokenizer_config.json", lambda line: ConfigError([f"{named}: {line}"]))
    try:
        backend = open_backend(path, stamps(path))
        if len(backend) <= len(backend.added_tokens_decoder):  # transformers makes one of no files, which has no words
            raise ValueError("it has no tokens: tokenizer.json is missing or empty")
    except Exception as error:  # transformers raises anything for files that somebody else wrote
        reason = one_line(str(error), 300) or type(error).__name__
        advice = "give a directory with tokenizer.json and tokenizer_config.json, or a hub name when online"
        raise ConfigError([f"{named} cannot be loaded ({reason}); {advice}"]) from error
    directories = dict.fromkeys([path, *model_directories])
    return Tokenizer(backend, path, (number for directory in directories for number in end_token_ids(directory)))


@lru_cache(maxsize=2)
def open_backend(path: str, _stamps: Collection[tuple[str, int, int]]) -> Any:
    """Return what transformers makes of ``path``: once for files with the same `stamps`, as checks and run both ask."""
    from transformers import AutoTokenizer  # seconds of import, needed only here

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **_known_model(path))


def stamps(path: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, time of change in ns and bytes of each file of a directory; nothing of a name on the hub."""
    if not os.path.isdir(path):
        return ()
    files = sorted(os.scandir(path), key=lambda file: file.name)
    if odd := next((file.name for file in files if not (file.is_file() or file.is_dir())), None):
        raise ValueError(f"{odd} is a device, a pipe or a broken link, not a file")
    return tuple((file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)


def _known_model(path: str) -> dict[str, Any]:
    """What `AutoTokenizer` asks a model's configuration to choose its class, of a model that transformers knows.

    It would build that configuration, for which it imports torch's compiler.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        model, tokenizer = (read_object(Path(path) / name) for name in ("config.json", "tokenizer_config.json"))
    except ConfigError:  # no directory, or one without a model
        return {}
    kind, names = model.get("model_type"), ("model_type", "model_name", "tokenizer_class")
    plain = isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES and isinstance(tokenizer.get("tokenizer_class"), str)
    if not plain or "auto_map" in model or "auto_map" in tokenizer:
        return {}
    return {"config": SimpleNamespace(_name_or_path=path, **{name: model[name] for name in names if name in model})}
