"""Positions where a prompt may continue from cached tokens, and snapshots of recurrent states. Plain Python.

    TruncatableCache   keys and values only: any common prefix
    Snapshots          a recurrent state cannot be truncated: only prefixes with a snapshot
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from megatron_rl.inference.sequence import Sequence

StateCopies = tuple[tuple[int, int], ...]
"""Rows of `RowStates`: (from, to)."""


class TruncatableCache:
    """Keys and values can be cut to any length, so no snapshots are needed."""

    can_cut = True
    """True if cached tokens can be truncated."""

    def lengths(self, token_ids: tuple[int, ...], most: int) -> Iterator[int]:
        """Yield the prefix lengths, at most ``most``, after which a prompt may continue; longest first."""
        del token_ids
        yield most

    def load(self, token_ids: tuple[int, ...], row: int) -> StateCopies:
        """Return the copy that restores the state after ``token_ids``, one of `lengths`, in ``row``."""
        del token_ids, row
        return ()

    def save(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        """Return the copy that snapshots the state of a sequence's row after ``token_ids``.

        These are its prompt, or a whole turn without its last token, which was not fed.
        """
        del sequence, token_ids, is_turn
        return ()

    def clear(self) -> None:
        """Drop all snapshots."""


class Snapshots(TruncatableCache):
    """Rows of `RowStates` behind those of the batch::

        P0 P1 P2 A0 A1 E        snapshots after P2 and after A1
        P0 P1 P2 A0 A1 E U0     the next turn continues after A1
        P0 P1 P2 B0 U0          with a rewritten history, after P2

    Eviction: first snapshots that a longer one of the conversation replaced and those without a later turn, then the
    least recently used.
    """

    can_cut = False

    def __init__(self, first: int, count: int, at_turns: bool = True) -> None:
        """``count`` rows from ``first``. Without ``at_turns`` only prompts are snapshotted."""
        self._rows, self._at_turns = range(first, first + count), at_turns
        self.clear()

    def clear(self) -> None:
        self._free = [*self._rows]
        self._held: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Row -> tokens, the next to evict first. Not keyed by tokens: every lookup would hash all of them."""

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
        """Yield the rows whose snapshot is a prefix of ``token_ids``."""
        for row, known in self._held.items():
            length = len(known)  # the cheap test first: at most places another token stands
            if length <= len(token_ids) and known[-1] == token_ids[length - 1] and known == token_ids[:length]:
                yield row
