"""From sampled tokens to text and tool calls: of a whole answer, and of one that is still sampled."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rl.endpoint.reasoning import overlap
from megatron_rl.environments.tool_calls import Tools, parse, split_thought
from megatron_rl.registry import PARSERS, REASONING
from megatron_rl.sampling import find_stop
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Message

CALL_BEGINS = re.compile(r"[<{]|\[TOOL_CALLS\]|^ to\b")
PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Decoded from a character of which not all bytes are sampled yet."""
CONTEXT = 16
"""Tokens before and after a place that show whether texts can be cut there: characters over several tokens, spaces at
the beginning that decoders strip."""
WINDOW = 4 * CONTEXT


@dataclass(frozen=True)
class Choice:
    """One answer."""

    text: str
    """Without the stop string that ended it, and without tool calls."""
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str
    """OpenAI's: stop, length or tool_calls."""
    completion: Completion
    thought: str = ""

    @property
    def message(self) -> Message:
        """The assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls:
            message |= {"content": self.text or None, "tool_calls": list(self.tool_calls)}
        return message


class AnswerReader:
    """Reads the answers to one request."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), parser: str = "", tools: Tools = (),
        call_prefix: str = "call", reasoning: str = "none", prompt_ids: Sequence[int] = (), min_tokens: int = 0,
    ) -> None:  # fmt: skip
        """``parser`` finds calls of ``tools``, whose ids begin with ``call_prefix``; without it they stay text.

        So do thoughts without a ``reasoning`` parser; ``prompt_ids`` may end where one begins. No ``stop`` string that
        is complete within ``min_tokens`` counts.
        """
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._parser, self._tools, self._call_prefix = parser, tools, call_prefix
        self._reasoning = thinks = None if reasoning == "none" else REASONING.get(reasoning)
        before = tokenizer.decode_raw(prompt_ids[-CONTEXT:]) if thinks else ""
        self._is_begun = bool(thinks) and before.rstrip().endswith(thinks.begin)
        marks = (thinks.begin, thinks.end) if thinks else ()
        shown = (*marks, *(PARSERS.get(parser).markers if parser else ()))
        self._stop_marks = [token for token in tokenizer.special_in(self._stop) if token not in shown]
        """Special tokens that are decoded for the sake of stop strings alone."""
        self._marks, self._min_tokens = (*marks, *self._stop_marks), min_tokens

    def choice(self, completion: Completion) -> Choice:
        """Read a whole answer."""
        text = self._before_stop(self._decode(completion.token_ids), completion.token_ids)
        thought, text = self._split(text, is_whole=True)
        reason = "length" if completion.finish_reason == "length" else "stop"
        if not self._parser:
            return Choice(text, (), reason, completion, thought)
        parsed = parse(text, self._tools, self._parser, self._call_prefix)
        calls = tuple(call.as_message() for call in parsed.calls)
        reason = "tool_calls" if calls and reason == "stop" else reason
        return Choice(parsed.content, calls, reason, completion, thought)

    def decoder(self) -> IncrementalDecoder:
        """Return the decoder whose texts `final_parts` takes, for one answer."""
        return IncrementalDecoder(self._tokenizer, self._parser, self._marks)

    def final_parts(self, text: str, token_ids: Sequence[int] = ()) -> tuple[str, str]:
        """Return what of thought and answer stays whatever follows: no partial character, stop string, mark or call."""
        text = self._before_stop(text.rstrip(PARTIAL_CHARACTER), token_ids)
        held_back = max((overlap(text, string) for string in self._stop), default=0)
        thought, text = self._split(text[: len(text) - held_back], is_whole=False)
        return thought, _before_calls(text) if self._parser else text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._parser, self._marks)

    def _split(self, text: str, is_whole: bool) -> tuple[str, str]:
        for mark in self._stop_marks:
            text = text.replace(mark, "")
        return ("", text) if self._reasoning is None else self._reasoning.split(text, self._is_begun, is_whole)

    def _before_stop(self, text: str, token_ids: Sequence[int]) -> str:
        """``text`` before the first of the caller's stop strings that counts."""
        least = len(self._decode(token_ids[: self._min_tokens])) if self._min_tokens and self._stop else 0
        return text[: find_stop(text, self._stop, least)]


class IncrementalDecoder:
    """Decodes a growing list of ids at the cost of the new ones; the text is that of decoding all of them.

        ids     ...... context | since then          of which a window is kept
        text    head ......... | decode(window)[cut:]
    """

    def __init__(self, tokenizer: Tokenizer, calls_of: str = "", marks: Collection[str] = ()) -> None:
        """``calls_of`` and ``marks`` as in `Tokenizer.decode`."""
        self._decode = partial(tokenizer.decode, calls_of=calls_of, marks=marks)
        self._left_out, self._byte_tokens = tokenizer.left_out(calls_of, marks), tokenizer.byte_tokens
        self._num_read, self._window, self._limit = 0, [], WINDOW
        self._head, self._cut = "", 0

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, all there are, without byte tokens at the end, which others may change."""
        # Without the tokens that have no text, so that a context always has some.
        self._window += [number for number in token_ids[self._num_read :] if number not in self._left_out]
        self._num_read = len(token_ids)
        end = len(self._window)
        while end and self._window[end - 1] in self._byte_tokens:
            end -= 1
        text = self._decode(self._window[:end])
        whole = self._head + text[self._cut :]
        if end > self._limit:
            self._limit = WINDOW if self._slide(end, text) else 2 * end
        return whole

    def _slide(self, end: int, text: str) -> bool:
        """Shorten the window where a cut changes nothing of ``text``, that of ``window[:end]``."""
        for cut in range(end - CONTEXT, end - 2 * CONTEXT, -1):
            if {self._window[cut - 1], self._window[cut]} <= self._byte_tokens:
                continue
            before, context = self._decode(self._window[:cut]), self._decode(self._window[cut - CONTEXT : cut])
            rest = self._decode(self._window[cut - CONTEXT : end])
            if text == before + rest[len(context) :]:
                self._head += before[self._cut :]
                self._window, self._cut = self._window[cut - CONTEXT :], len(context)
                return True
        return False


def _before_calls(text: str) -> str:
    """What is no call in any parser's form, and stays when calls follow: space around it goes then."""
    thought, answer = split_thought(text)
    call = CALL_BEGINS.search(answer)
    shown = (thought + (answer[: call.start()] if call else answer)).rstrip()
    return "" if shown[:1].isspace() else shown
