"""Assign blocks of the KV cache to sequences, and find cached prefixes. Plain Python, no tensors.

    RowBlocks     every row has one block, as long as the longest sequence; common prefixes are copied
    PagedBlocks   a sequence has a table of short blocks (paged_blocks.py); full blocks of a common prefix are shared
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.arithmetic import FEWEST_ROWS
from megatron_rl.inference.sequence import Sequence
from megatron_rl.inference.snapshots import StateCopies, TruncatableCache

FEWEST_REUSED = 16
"""Shorter common prefixes are not reused: they save less than the extra pass costs."""


Copies = tuple[tuple[int, int, int], ...]
"""Copies in the cache, done at once, so that two blocks can be swapped: (source, destination, tokens).

Source and destination are blocks, or rows in a cache of rows, of which the first ``tokens`` are copied.
"""


@dataclass(frozen=True)
class Allocation:
    """The first ``count`` sequences were given a row and blocks."""

    count: int
    reused: int = 0
    """Cached prompt tokens."""
    copies: Copies = ()
    """Bring the cached prefix to the first sequence, and save reusable prefixes that would be overwritten."""
    states: StateCopies = ()
    """Bring the recurrent states after the prefix."""


class BlockManager(Protocol):
    """The interface between the scheduler and the blocks of the KV cache."""

    usage: tuple[int, int] = (0, 0)
    """Blocks held by sequences, and blocks in all; zeros for a cache of rows."""

    def num_cached(self, token_ids: tuple[int, ...]) -> int:
        """Return how many tokens at the beginning of a prompt are cached."""

    def allocate(self, sequences: ListOf[Sequence], free: list[int], lookahead: int) -> Allocation | None:
        """Give rows and blocks to the first of ``sequences``, which share a prompt; None if not even one fits.

        Each must have room for its prompt and ``lookahead`` new tokens. An empty cache always fits one.
        """

    def share(self, sequences: ListOf[Sequence], length: int) -> Copies:
        """Return the copies that give the prompt of the first sequence, ``length`` tokens, to the others."""

    def remember(self, sequences: ListOf[Sequence], token_ids: tuple[int, ...]) -> StateCopies:
        """Register the prompt of ``sequences`` as cached; return the copy that snapshots the states at its end."""

    def extend(self, sequence: Sequence, length: int) -> bool:
        """Provide blocks for the first ``length`` tokens; False when there are too few. A row always has room."""
        return True

    def free(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        """Release the row, whose blocks hold ``token_ids``; return the copy that snapshots the states after a turn."""

    def move(self, moves: ListOf[tuple[int, int]], length: int) -> Copies:
        """Move sequences of at most ``length`` tokens between rows (from, to); return the copies in the cache."""

    def changed_table(self) -> array | None:
        """Return the block table, row after row, if it has changed since the last call."""

    def clear(self) -> None:
        """Free all rows and forget cached prefixes."""


def reusable(length: int) -> int:
    """Return how many tokens of a prompt may be reused at most.

    The last one must be computed for its logits, and a few more because small matrix products round differently.
    """
    return max(0, length - FEWEST_ROWS)


class RowBlocks(BlockManager):
    """One block per row: a free row has room for the longest sequence.

    A finished sequence stays in its row as a cached prefix until the row is needed, or a prompt continues it (the next
    turn of a conversation). Sequences take the lowest free rows, because all rows below a running one are computed.
    Idle rows also write to the cache, but behind the cached prefix.
    """

    def __init__(self, reuse: bool = True, resume: TruncatableCache | None = None) -> None:
        """``reuse``: look up cached prefixes; ``resume``: the positions where a prompt may continue."""
        self._reuse, self._resume = reuse, resume or TruncatableCache()
        self._known: dict[int, tuple[int, ...]] = {}
        """Row -> the tokens in it; the most recently registered last."""
        self._kept: set[int] = set()
        """Rows whose conversation will probably continue."""

    def num_cached(self, token_ids: tuple[int, ...]) -> int:
        return self._best_source(set(), token_ids)[1]

    def allocate(self, sequences: ListOf[Sequence], free: list[int], lookahead: int) -> Allocation:
        token_ids, unused = sequences[0].prefill_ids, set(free)
        is_scored = sequences[0].request.hints.scores_prompt
        source, reused = (None, 0) if is_scored else self._best_source(unused, token_ids)
        # First rows without a continuing conversation, lowest first; then the least recently used.
        order = sorted(unused - self._kept) + [row for row in self._known if row in self._kept & unused]
        if source in order and self._known[source] == token_ids[: len(self._known[source])]:
            order.remove(source)
            order.insert(0, source)
        count = min(len(sequences), len(order))
        given_up, rows = order[:count], sorted(free)[:count]
        left, entered = [r for r in given_up if r not in rows], [r for r in rows if r not in given_up]
        copies = self._swap_kept(list(zip(left, entered, strict=True)))
        if source is not None and source != rows[0]:
            copies += ((source, rows[0], reused),)
        for sequence, row in zip(sequences[:count], rows, strict=True):
            sequence.row = row
            self._forget(row)
        states = () if source is None else self._resume.load(token_ids[:reused], rows[0])
        return Allocation(count, reused, copies, states)

    def share(self, sequences: ListOf[Sequence], length: int) -> Copies:
        return tuple((sequences[0].row, other.row, length) for other in sequences[1:])

    def remember(self, sequences: ListOf[Sequence], token_ids: tuple[int, ...]) -> StateCopies:
        for sequence in sequences:
            self._learn(sequence.row, token_ids)
        return self._resume.save(sequences[0], token_ids)

    def free(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        self._learn(sequence.row, token_ids, sequence.request.hints.goes_on)
        return self._resume.save(sequence, token_ids, is_turn) if is_turn else ()

    def move(self, moves: ListOf[tuple[int, int]], length: int) -> Copies:
        return (*((*move, length) for move in moves), *self._swap_kept(moves))

    def clear(self) -> None:
        self._known.clear()
        self._kept.clear()
        self._resume.clear()

    def _learn(self, row: int, token_ids: tuple[int, ...], keep: bool = False) -> None:
        self._forget(row)
        if self._reuse and len(token_ids) >= FEWEST_REUSED:
            self._known[row] = token_ids
            if keep:
                self._kept.add(row)

    def _swap_kept(self, moves: ListOf[tuple[int, int]]) -> Copies:
        """Swap kept prefixes with the sequences that move to their rows; the order of age stays."""
        kept = [(destination, source) for source, destination in moves if destination in self._kept]
        copies = tuple((row, to, len(self._known[row])) for row, to in kept)
        places = dict([*moves, *kept])
        gone = set(places.values()) - places.keys()
        self._kept = {places.get(row, row) for row in self._kept - gone}
        self._known = {places.get(row, row): known for row, known in self._known.items() if row not in gone}
        return copies

    def _forget(self, row: int) -> None:
        self._known.pop(row, None)
        self._kept.discard(row)

    def _best_source(self, free: set[int], token_ids: tuple[int, ...]) -> tuple[int | None, int]:
        """Return the row with the longest common prefix, and its length; prefer free rows."""
        best, reused, most = None, FEWEST_REUSED - 1, reusable(len(token_ids))
        for row, known in self._known.items():
            # The cheap test first: most rows have a shorter common prefix than the best so far.
            if known[: reused + 1] == token_ids[: reused + 1] and reused < most:
                best, reused = row, min(_common_prefix(known, token_ids), most)
            elif best is not None and row in free and best not in free and known[:reused] == token_ids[:reused]:
                best = row
        reused = 0 if best is None else next(self._resume.lengths(token_ids, reused), 0)
        return (best, reused) if reused >= FEWEST_REUSED else (None, 0)


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
