"""The text of tokens that are drawn one after another, without decoding all of them at every look."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron_rl.tokenizer import Tokenizer

CONTEXT = 16
"""Tokens before and after a place that show whether texts can be cut there: characters over several tokens, spaces at
the beginning that decoders strip."""
WINDOW = 4 * CONTEXT


class GrowingText:
    """The text of a growing list of ids: what decoding all of them gives, at the cost of the last ones.

        ids     ...... context | since then          of which a window is kept
        text    head ......... | decode(window)[cut:]
    """

    def __init__(self, tokenizer: Tokenizer, calls_of: str = "") -> None:
        """``calls_of`` as in `Tokenizer.decode`."""
        self._decode = partial(tokenizer.decode, calls_of=calls_of)
        self._left_out, self._bytes = tokenizer.left_out(calls_of), tokenizer.byte_tokens
        self._read, self._window, self._limit = 0, [], WINDOW
        self._head, self._cut = "", 0

    def read(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, all there are so far; without byte tokens at the end, which others may change."""
        # Without the tokens that have no text, so that a context always has some.
        self._window += [number for number in token_ids[self._read :] if number not in self._left_out]
        self._read = len(token_ids)
        end = len(self._window)
        while end and self._window[end - 1] in self._bytes:
            end -= 1
        text = self._decode(self._window[:end])
        told = self._head + text[self._cut :]
        if end > self._limit:
            self._limit = WINDOW if self._slide(end, text) else 2 * end
        return told

    def _slide(self, end: int, text: str) -> bool:
        """Settle what the window begins with: there a cut changes nothing of ``text``, that of ``window[:end]``."""
        for cut in range(end - CONTEXT, end - 2 * CONTEXT, -1):
            if {self._window[cut - 1], self._window[cut]} <= self._bytes:
                continue
            before, context = self._decode(self._window[:cut]), self._decode(self._window[cut - CONTEXT : cut])
            rest = self._decode(self._window[cut - CONTEXT : end])
            if text == before + rest[len(context) :]:
                self._head += before[self._cut :]
                self._window, self._cut = self._window[cut - CONTEXT :], len(context)
                return True
        return False
