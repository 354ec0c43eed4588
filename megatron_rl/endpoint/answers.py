"""From sampled tokens to what OpenAI's clients read: text, calls of tools, log-probs, objects and chunks."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from megatron_rl.endpoint.growing import GrowingText
from megatron_rl.environments.tool_calls import END_OF_THOUGHT, THOUGHT, Tools, parse
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Message

CALL_BEGINS = re.compile("[<{]")
HALF = "\N{REPLACEMENT CHARACTER}"
"""A character of which not all bytes are drawn yet."""


@dataclass(frozen=True)
class Choice:
    """One answer."""

    text: str
    """Without the stop string that ended it, and without calls of tools."""
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str
    """OpenAI's: stop, length or tool_calls."""
    completion: Completion

    @property
    def message(self) -> Message:
        """The assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message |= {"content": self.text or None, "tool_calls": list(self.tool_calls)}
        return message


class AnswerReader:
    """Reads the answers to one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        parser: str = "",
        tools: Tools = (),
        call_prefix: str = "call",
    ) -> None:
        """``parser`` finds calls of ``tools``, whose ids begin with ``call_prefix``; empty: they stay text."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._parser, self._tools, self._call_prefix = parser, tools, call_prefix

    def choice(self, completion: Completion) -> Choice:
        """The whole answer."""
        text = self._cut(self._tokenizer.decode(completion.token_ids, self._parser))
        reason = "length" if completion.finish_reason == "length" else "stop"
        if not self._parser:
            return Choice(text, (), reason, completion)
        parsed = parse(text, self._tools, self._parser, self._call_prefix)
        calls = tuple(call.as_message() for call in parsed.calls)
        return Choice(parsed.content, calls, "tool_calls" if calls and reason == "stop" else reason, completion)

    def _cut(self, text: str) -> str:
        """``text`` before the first of the caller's stop strings."""
        found = [index for index in map(text.find, self._stop) if index >= 0]
        return text[: min(found)] if found else text

    def growing(self) -> GrowingText:
        """What `certain` is asked of, for one answer."""
        return GrowingText(self._tokenizer, self._parser)

    def certain(self, text: str) -> str:
        """What of a text stays whatever comes: not half a character, or what may be the beginning of a stop string."""
        text = self._cut(text.rstrip(HALF))
        held = max((_begun(text, string) for string in self._stop), default=0)
        text = text[: len(text) - held]
        return _before_calls(text) if self._parser else text


def _before_calls(text: str) -> str:
    """What is no call in any parser's form, and stays when calls follow: space around it goes then.

    A thought is searched for no calls.
    """
    thought, mark, said = text.partition(END_OF_THOUGHT)
    if not mark:
        thought, said = (text, "") if text.startswith(THOUGHT) else ("", text)
    call = CALL_BEGINS.search(said)
    shown = (thought + mark + (said[: call.start()] if call else said)).rstrip()
    return "" if shown[:1].isspace() else shown


def _begun(text: str, string: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)


@dataclass(frozen=True)
class Envelope:
    """What all objects of one answer have in common."""

    kind: str
    """``chat.completion`` or ``text_completion``."""
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completion"

    def around(self, choices: list[dict[str, Any]], chunk: bool = False, **more: Any) -> dict[str, Any]:
        """The object with ``choices``."""
        kind = "chat.completion.chunk" if chunk and self.is_chat else self.kind
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model,
            "choices": choices, **more,
        }  # fmt: skip

    def whole(self, shown: Sequence[str], usage: dict[str, Any], policy_version: int) -> str:
        """The JSON answer to a request that does not stream, of its choices as `shown`."""
        rest = self.around([], usage=usage, system_fingerprint=f"policy-{policy_version}")
        del rest["choices"]
        return f'{json.dumps(rest)[:-1]}, "choices": [{", ".join(shown)}]}}'

    def shown(self, index: int, choice: Choice, logprobs: Tokenizer | None) -> str:
        """JSON of one choice; ``logprobs`` decodes tokens where they are wanted."""
        said = {"message": choice.message} if self.is_chat else {"text": choice.text}
        return json.dumps({"index": index, **said, **self.ending(choice, logprobs)})

    def delta(self, index: int, text: str, first: bool) -> bytes:
        """The event of a chunk with more text of a choice."""
        if not self.is_chat:
            said: dict[str, Any] = {"text": text}
        else:
            said = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
        return event(self.around([{"index": index, **said, "logprobs": None, "finish_reason": None}], chunk=True))

    def last(self, index: int, choice: Choice, rest: str, logprobs: Tokenizer | None) -> bytes:
        """The event of a choice's last chunk: the rest of its text, its calls of tools, its log-probs."""
        if not self.is_chat:
            said: dict[str, Any] = {"text": rest}
        else:
            calls = [{"index": number, **call} for number, call in enumerate(choice.tool_calls)]
            said = {"delta": {**({"content": rest} if rest else {}), **({"tool_calls": calls} if calls else {})}}
        return event(self.around([{"index": index, **said, **self.ending(choice, logprobs)}], chunk=True))

    def ending(self, choice: Choice, logprobs: Tokenizer | None) -> dict[str, Any]:
        """Why it ended, and its log-probs."""
        shown = None
        if logprobs is not None:
            shown = (chat_logprobs if self.is_chat else text_logprobs)(choice.completion, logprobs)
        return {"logprobs": shown, "finish_reason": choice.finish_reason}


def chat_logprobs(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of every sampled token, end tokens among them; natural logarithms."""
    content = []
    for text, logprob in _tokens(completion, tokenizer):
        own_bytes = None if HALF in text else list(text.encode())
        content.append({"token": text, "logprob": logprob, "bytes": own_bytes, "top_logprobs": []})
    return {"content": content, "refusal": None}


def text_logprobs(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """The same as `/v1/completions` has it; offsets count characters of the tokens' own texts."""
    texts, logprobs = zip(*_tokens(completion, tokenizer), strict=True)
    offsets = [0, *accumulate(map(len, texts))][:-1]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def _tokens(completion: Completion, tokenizer: Tokenizer) -> Iterator[tuple[str, float]]:
    for token, logprob in zip(completion.token_ids, completion.inference_logprobs, strict=True):
        yield tokenizer.decode_raw([token]), logprob


def event(value: Any) -> bytes:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n".encode()
