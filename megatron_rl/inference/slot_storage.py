"""The books of a cache of slots: each is a stretch of memory for one sequence, and stays filled until it is taken."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.inference.storage import FEWEST_REUSED, Copies, Entry, Need, common_beginning, reusable


class SlotStorage:
    """Room is never short: a free slot holds the longest sequence.

    What a finished sequence leaves in its slot is parked there. A prompt that begins with it takes the slot and goes
    on from its end: the next turn of a conversation. Any other common beginning is copied.
    """

    def __init__(self, reuse: bool = True) -> None:
        """Without ``reuse`` every prompt is computed from its beginning."""
        self._reuse = reuse
        self._known: dict[int, tuple[int, ...]] = {}
        """Tokens in the cache of a slot; last learned or parked stands last."""

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
            self._known.pop(slot, None)
        return Entry(slots, reused, copies) if slots else None

    def share(self, slots: Sequence[int], length: int) -> Copies:
        """See `Storage`."""
        return Copies(tuple((slots[0], slot) for slot in slots[1:]), length)

    def learn(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """See `Storage`."""
        known = tuple(tokens)
        for slot in slots:
            self._known.pop(slot, None)
            if self._reuse and len(known) >= FEWEST_REUSED:
                self._known[slot] = known

    def grow(self, slot: int, length: int) -> bool:
        """See `Storage`."""
        del slot, length
        return True

    def leave(self, slot: int, tokens: Sequence[int]) -> None:
        """See `Storage`."""
        self.learn([slot], tokens)

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> Copies:
        """See `Storage`; what is parked where a sequence goes takes the place it comes from."""
        pairs = list(moves)
        for source, destination in moves:
            coming, parked = self._known.pop(source, None), self._known.pop(destination, None)
            if coming is not None:
                self._known[destination] = coming
            if parked is not None:
                self._known[source] = parked
                pairs.append((destination, source))
                length = max(length, len(parked))
        return Copies(tuple(pairs), length)

    def clear(self) -> None:
        """See `Storage`."""
        self._known.clear()

    def _order(self, vacant: Sequence[int]) -> list[int]:
        """Slots with nothing worth keeping first, from the lowest; then what was parked longest ago."""
        empty = sorted(slot for slot in vacant if slot not in self._known)
        free = set(vacant)
        return empty + [slot for slot in self._known if slot in free]

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
