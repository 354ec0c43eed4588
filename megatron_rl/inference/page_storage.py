"""The books of a cache of pages: which pages a sequence has, which it shares, and how many are promised."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from megatron_rl.inference.blocks import NOBODYS, PagePool
from megatron_rl.inference.storage import FEWEST_REUSED, Copies, Entry, Need, reusable


class PageStorage:
    """A sample enters when what it needs soon is free, and what it may need is not promised to others.

    Samples of one prompt share its full pages, and so do prompts with a common beginning of full pages.
    """

    def __init__(
        self, slots: int, pages_per_slot: int, pool: PagePool, reuse: bool = True, overcommit: float = 1.0
    ) -> None:
        """``overcommit`` is how often the pages may be promised; 1 keeps to the longest length of every sample."""
        self._width = pages_per_slot
        self._pool = pool
        self._reuse = reuse
        self._overcommit = overcommit
        self._pages: dict[int, list[int]] = {}
        self._promised: dict[int, int] = {}
        """Pages that a slot may come to have."""
        self.table = array("i", [NOBODYS]) * (slots * pages_per_slot)
        """Row after row, the page of each stretch of a slot; `NOBODYS` where it has none."""
        self.changed = True
        """Set with every change of the table; whoever copies it resets it."""

    def cached(self, tokens: Sequence[int]) -> int:
        """See `Storage`."""
        return len(self._found(tokens)) * self._pool.page_length

    def enter(self, vacant: Sequence[int], tokens: Sequence[int], samples: int, need: Need) -> Entry | None:
        """See `Storage`."""
        pool = self._pool
        found = self._found(tokens)
        full = len(tokens) // pool.page_length
        soon, later = self._pages_for(need.soon), self._wanted(need)
        count = min(samples, len(vacant))
        count = self._fitting(count, sum(map(pool.is_idle, found)) - len(found) + full, soon - full, later - full, need)
        if count == 0:
            return None
        pool.hold(found)
        leader = found + pool.take(soon - len(found))
        slots = tuple(sorted(vacant)[:count])
        for slot in slots:
            if slot == slots[0]:
                pages = leader
            else:
                pool.hold(leader[:full])
                pages = leader[:full] + pool.take(soon - full)
            self._set(slot, pages)
            self._promised[slot] = later
        return Entry(slots, len(found) * pool.page_length)

    def share(self, slots: Sequence[int], length: int) -> Copies:
        """See `Storage`; only the last page, where the prompt does not fill it, is everybody's own."""
        full, rest = divmod(length, self._pool.page_length)
        own = [self._pages[slot][full] for slot in slots] if rest else []
        return Copies(tuple((own[0], page) for page in own[1:]), length)

    def learn(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """See `Storage`."""
        if self._reuse:
            self._pool.learn(tokens, self._pages[slots[0]])

    def grow(self, slot: int, length: int) -> bool:
        """See `Storage`."""
        pages = self._pages[slot]
        missing = self._pages_for(length) - len(pages)
        if missing > self._pool.available:
            return False
        if missing > 0:
            self._set(slot, pages + self._pool.take(missing))
        return True

    def leave(self, slot: int, tokens: Sequence[int], keep: bool = False) -> None:
        """See `Storage`; whatever is known is kept until its room is needed."""
        del keep
        self.learn([slot], tokens)
        self._pool.give_back(self._pages[slot])
        self._set(slot, [])
        del self._pages[slot], self._promised[slot]

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> Copies:
        """See `Storage`; rows of the table change places and nothing is copied."""
        del length
        for source, destination in moves:
            self._promised[destination] = self._promised.pop(source)
            pages = self._pages.pop(source)
            self._set(source, [])
            del self._pages[source]
            self._set(destination, pages)
        return Copies()

    def clear(self) -> None:
        """See `Storage`."""
        for slot in list(self._pages):
            self._set(slot, [])
        self._pages.clear()
        self._promised.clear()
        self._pool.clear()

    def _found(self, tokens: Sequence[int]) -> list[int]:
        length = self._pool.page_length
        if not self._reuse:
            return []
        found = self._pool.find(tokens[: reusable(len(tokens)) // length * length])
        return found if len(found) * length >= FEWEST_REUSED else []

    def _wanted(self, need: Need) -> int:
        """Pages to promise. Whoever was pre-empted comes back when all of it fits, lest it be pre-empted again."""
        careful = need.returning or self._overcommit == 1.0
        return max(self._pages_for(need.longest if careful else need.expected), self._pages_for(need.soon))

    def _fitting(self, count: int, shared: int, soon: int, later: int, need: Need) -> int:
        """How many of ``count`` samples may enter, if they take ``shared`` pages together and the others each."""
        limit = self._pool.count * (1.0 if need.returning else self._overcommit)
        promised = sum(max(0, wanted - len(self._pages[slot])) for slot, wanted in self._promised.items())
        free = self._pool.available - shared
        unpromised = limit - self._pool.held - promised - shared
        while count and (count * soon > free or count * later > unpromised):
            count -= 1
        return count

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.page_length)

    def _set(self, slot: int, pages: list[int]) -> None:
        start = slot * self._width
        self._pages[slot] = pages
        row = array("i", pages + [NOBODYS] * (self._width - len(pages)))
        self.table[start : start + self._width] = row
        self.changed = True
