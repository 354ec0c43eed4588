"""The books of a cache of slots: each is a stretch of memory for one sequence, and stays filled until it is taken."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.inference.storage import FEWEST_REUSED, Copies, Entry, Need, common_beginning, reusable


class SlotStorage:
    """Room is never short: a free slot holds the longest sequence.

    What a finished sequence leaves in its slot stays there until the slot is taken. A prompt that begins with it takes
    the slot and goes on from its end: the next turn of a conversation. Any other common beginning is copied. An idle
    row still writes to its slot, but behind what it has: at the position where its sequence ended.
    """

    def __init__(self, reuse: bool = True) -> None:
        """Without ``reuse`` every prompt is computed from its beginning."""
        self._reuse = reuse
        self._known: dict[int, tuple[int, ...]] = {}
        """Tokens in the cache of a slot; last learned or parked stands last."""
        self._kept: set[int] = set()
        """Slots whose sequences have ended and are likely to go on."""

    def cached(self, tokens: Sequence[int]) -> int:
        """See `Storage`."""
        return self._best_source(set(), tuple(tokens))[1]

    def enter(self, vacant: Sequence[int], tokens: Sequence[int], samples: int, need: Need) -> Entry | None:
        """See `Storage`."""
        del need
        tokens = tuple(tokens)
        source, reused = self._best_source(set(vacant), tokens)
        order = self._order(vacant)
        copies = Copies()
        if source in order and self._known[source] == tokens[: len(self._known[source])]:
            order.remove(source)
            order.insert(0, source)
        elif source is not None and order and order[0] != source:
            copies = Copies(((source, order[0]),), reused)
        slots = tuple(order[:samples])
        for slot in slots:
            self._forget(slot)
        return Entry(slots, reused, copies) if slots else None

    def share(self, slots: Sequence[int], length: int) -> Copies:
        """See `Storage`."""
        return Copies(tuple((slots[0], slot) for slot in slots[1:]), length)

    def learn(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """See `Storage`."""
        known = tuple(tokens)
        for slot in slots:
            self._forget(slot)
            if self._reuse and len(known) >= FEWEST_REUSED:
                self._known[slot] = known

    def grow(self, slot: int, length: int) -> bool:
        """See `Storage`."""
        del slot, length
        return True

    def leave(self, slot: int, tokens: Sequence[int], keep: bool = False) -> None:
        """See `Storage`."""
        self.learn([slot], tokens)
        if keep and slot in self._known:
            self._kept.add(slot)

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> Copies:
        """See `Storage`; what is kept where a sequence goes takes the place it comes from."""
        pairs = list(moves)
        for source, destination in moves:
            kept = self._known[destination] if destination in self._kept else ()
            self._forget(destination)
            if source in self._known:
                self._known[destination] = self._known.pop(source)
            if kept:
                self.leave(source, kept, keep=True)
                pairs.append((destination, source))
                length = max(length, len(kept))
        return Copies(tuple(pairs), length)

    def clear(self) -> None:
        """See `Storage`."""
        self._known.clear()
        self._kept.clear()

    def _forget(self, slot: int) -> None:
        self._known.pop(slot, None)
        self._kept.discard(slot)

    def _order(self, vacant: Sequence[int]) -> list[int]:
        """Slots that nobody will go on from, from the lowest; then what was kept longest ago."""
        free = set(vacant)
        return sorted(free - self._kept) + [slot for slot in self._known if slot in free & self._kept]

    def _best_source(self, vacant: set[int], tokens: tuple[int, ...]) -> tuple[int | None, int]:
        """The slot with the longest common beginning, and its length; a vacant one before one in use."""
        best, reused, most = None, FEWEST_REUSED - 1, reusable(len(tokens))
        for slot, known in self._known.items():
            # The cheap test first: most slots do not even have as much in common as the best so far.
            if known[: reused + 1] == tokens[: reused + 1] and reused < most:
                best, reused = slot, min(common_beginning(known, tokens), most)
            elif best is not None and slot in vacant and best not in vacant and known[:reused] == tokens[:reused]:
                best = slot
        return (None, 0) if best is None else (best, reused)
