"""Pages of the KV cache: who holds how many, which can be reused, which go first. Plain Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

NOBODYS = 0
"""The page that rows without a sequence write to."""

_Key = tuple[int, tuple[int, ...]]
"""Number of the content before the page (0: it is the first), and the page's own tokens."""


@dataclass(frozen=True)
class _Content:
    number: int
    """Never used again, so that a page is found only behind the very pages it was computed with."""
    page: int


class PagePool:
    """Pages ``1 .. count`` with reference counts.

    A full page whose tokens are known may be held by several sequences, and is kept when nobody holds it any more,
    until its room is needed: the page longest without a holder goes first.
    """

    def __init__(self, count: int, page_length: int) -> None:
        self.count = count
        self.page_length = page_length
        self.clear()

    def clear(self) -> None:
        """Nobody holds anything, nothing is known."""
        self._free = list(range(self.count, 0, -1))
        self._holders = [0] * (self.count + 1)
        self._contents: dict[_Key, _Content] = {}
        self._key_of: dict[int, _Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Known pages without a holder, the longest idle first."""
        self._next_number = 1

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages that somebody holds, each counted once."""
        return self.count - self.available

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def take(self, number: int) -> list[int]:
        """Pages to write to; there must be as many `available`."""
        return [self._take() for _ in range(number)]

    def hold(self, pages: Sequence[int]) -> None:
        """One holder more."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less. The last pages of a sequence go first: without those before them they are useless."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def is_idle(self, page: int) -> bool:
        """True when nobody holds it, but its content is known."""
        return page in self._idle

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of ``tokens``, as far as it is known; nobody holds them for it yet."""
        return [content.page for content in self._chain(tokens)]

    def learn(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """``pages`` hold ``tokens``; the full ones among them can be found from now on."""
        known = self._chain(tokens)
        before = known[-1].number if known else 0
        length = self.page_length
        for index in range(len(known), len(tokens) // length):
            page = pages[index]
            if page in self._key_of:  # behind a twin of the page it was computed with
                return
            key = (before, tuple(tokens[index * length : (index + 1) * length]))
            content = _Content(self._next_number, page)
            self._next_number += 1
            self._contents[key], self._key_of[page] = content, key
            before = content.number

    def _chain(self, tokens: Sequence[int]) -> list[_Content]:
        found: list[_Content] = []
        length, before = self.page_length, 0
        for start in range(0, len(tokens) - length + 1, length):
            content = self._contents.get((before, tuple(tokens[start : start + length])))
            if content is None:
                break
            found.append(content)
            before = content.number
        return found

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._contents[self._key_of.pop(page)]
        self._holders[page] = 1
        return page
