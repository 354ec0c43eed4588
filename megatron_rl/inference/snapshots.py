"""Where a prompt may go on from what the cache holds, and the copies of recurrent states that this takes. Plain Python.

AnyPosition   keys and values alone: the longest common beginning
Snapshots     a recurrent state is that of all its tokens and cannot be cut back: only where a copy of one was kept
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from megatron_rl.inference.sequence import Sequence

StateCopies = tuple[tuple[int, int], ...]
"""Rows of `RowStates`: (from, to)."""


class AnyPosition:
    """A prompt may go on anywhere, and nothing has to be kept for it."""

    can_cut = True
    """What a sequence left may be cut back to fewer tokens."""

    def lengths(self, token_ids: tuple[int, ...], most: int) -> Iterator[int]:
        """Yield after how many of the tokens, at most ``most``, a prompt may go on, the longest first."""
        del token_ids
        yield most

    def load(self, token_ids: tuple[int, ...], row: int) -> StateCopies:
        """Return the copy that lets ``row`` go on after ``token_ids``, one of `lengths`."""
        del token_ids, row
        return ()

    def save(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        """Return the copy that keeps the state of a sequence's row, which stands after ``token_ids``.

        They are its prompt, or a whole turn but for its last token: that was drawn, not fed.
        """
        del sequence, token_ids, is_turn
        return ()

    def clear(self) -> None:
        """Forget all copies."""


class Snapshots(AnyPosition):
    """Rows of `RowStates` behind those of the batch::

        P0 P1 P2 A0 A1 E        snapshots after P2 and after A1
        P0 P1 P2 A0 A1 E U0     the next turn goes on after A1
        P0 P1 P2 B0 U0          with a rewritten history, after P2

    The least recently used goes first; before it what a longer snapshot of the conversation has replaced, and what no
    later turn will ask for.
    """

    can_cut = False

    def __init__(self, first: int, count: int, at_turns: bool = True) -> None:
        """``first`` of ``count`` rows. Without ``at_turns`` only prompts leave snapshots."""
        self._rows, self._at_turns = range(first, first + count), at_turns
        self.clear()

    def clear(self) -> None:
        self._free = [*self._rows]
        self._held: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Row -> tokens; the first to go stands first. Not by tokens: each look at one would hash all of them."""

    def lengths(self, token_ids: tuple[int, ...], most: int) -> Iterator[int]:
        found = (len(self._held[row]) for row in self._fitting(token_ids))
        yield from sorted((length for length in found if length <= most), reverse=True)

    def load(self, token_ids: tuple[int, ...], row: int) -> StateCopies:
        (source,) = (found for found in self._fitting(token_ids) if self._held[found] == token_ids)
        self._held.move_to_end(source)
        return ((source, row),)

    def save(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        goes_on = sequence.request.hints.goes_on
        if is_turn and not (goes_on and self._at_turns):
            return ()
        row = max(self._fitting(token_ids), key=lambda found: len(self._held[found]), default=None)
        if row is None or self._held[row] != token_ids:
            if row is not None and goes_on:
                self._held.move_to_end(row, last=False)
            row = self._free.pop() if self._free else self._held.popitem(last=False)[0]
            self._held[row] = token_ids
        self._held.move_to_end(row, last=goes_on)
        return ((sequence.row, row),)

    def _fitting(self, token_ids: tuple[int, ...]) -> Iterator[int]:
        """Yield the rows with the states after some beginning of ``token_ids``."""
        for row, known in self._held.items():
            length = len(known)  # the cheap test first: at most places another token stands
            if length <= len(token_ids) and known[-1] == token_ids[length - 1] and known == token_ids[:length]:
                yield row
