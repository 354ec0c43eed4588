"""Which blocks of the KV cache hold which sequence, and what of them can be used again: never touches a tensor.

    RowBlocks     every row has one block, as long as the longest sequence; common beginnings are copied
    PagedBlocks   a sequence has a table of short blocks (paged_blocks.py); full blocks of a common beginning are shared
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.arithmetic import FEWEST_ROWS
from megatron_rl.inference.sequence import Sequence
from megatron_rl.inference.snapshots import AnyPosition, StateCopies

FEWEST_REUSED = 16
"""A shorter common beginning is not worth a pass of its own."""


Copies = tuple[tuple[int, int, int], ...]
"""What has to be copied in the cache, all at once so that two may exchange places: (from, to, tokens that matter).

From and to are blocks, or rows where each row has one. The tokens are the first of a row.
"""


@dataclass(frozen=True)
class Allocation:
    """The first ``count`` sequences have got a row and blocks."""

    count: int
    reused: int = 0
    """Tokens at the beginning of their prompt that need not be computed again."""
    copies: Copies = ()
    """What brings them to the first sequence, and saves what others are to find from what is written now."""
    states: StateCopies = ()
    """What brings the recurrent states after them."""


class BlockManager(Protocol):
    """The interface between the scheduler and the blocks of the KV cache."""

    usage: tuple[int, int] = (0, 0)
    """How many blocks sequences hold, and how many there are; of rows none."""

    def num_cached(self, token_ids: tuple[int, ...]) -> int:
        """Return how many tokens at the beginning of a prompt need not be computed again."""

    def allocate(self, sequences: ListOf[Sequence], free: list[int], lookahead: int) -> Allocation | None:
        """Give ``free`` rows and blocks to as many of the ``sequences``, of one prompt, as possible; None: to none.

        They must fit with ``lookahead`` tokens drawn. The first sequence of an empty cache always does.
        """

    def share(self, sequences: ListOf[Sequence], length: int) -> Copies:
        """Return the copies that give a prompt of ``length`` tokens, computed for the first sequence, to the others."""

    def remember(self, sequences: ListOf[Sequence], token_ids: tuple[int, ...]) -> StateCopies:
        """Note that the blocks of ``sequences`` hold their prompt by the time the next prompts are computed.

        Returns the copy that keeps the recurrent states at its end.
        """

    def extend(self, sequence: Sequence, length: int) -> bool:
        """Provide blocks for the first ``length`` tokens; False when there are too few. A row always has room."""
        return True

    def free(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        """Take the row back; its blocks hold ``token_ids``, which may be used again.

        Returns the copy that keeps the recurrent states of a turn, which stand after these tokens.
        """

    def move(self, moves: ListOf[tuple[int, int]], length: int) -> Copies:
        """Move sequences of at most ``length`` tokens between rows (from, to); returns the copies that this takes."""

    def changed_table(self) -> array | None:
        """Return the block table, row after row, if it has changed since the last call."""

    def clear(self) -> None:
        """Free all rows, and forget what the cache holds."""


def reusable(length: int) -> int:
    """Return how many tokens of a prompt may be reused at most: the last one is computed, for its logits.

    A few more are: a CPU's product of fewer rows adds up in another order.
    """
    return max(0, length - FEWEST_ROWS)


class RowBlocks(BlockManager):
    """There is always room: a free row holds the longest sequence.

    What a finished sequence leaves in its row stays until that is given up: to a prompt that begins with all of it, the
    next turn of a conversation, or for want of rows. Sequences take the lowest free rows, as all rows below a running
    one are computed. A row without a sequence is written to as well, but behind what it holds, where a sequence ended.
    """

    def __init__(self, reuse: bool = True, resume: AnyPosition | None = None) -> None:
        """Without ``reuse`` every prompt is computed from its beginning; ``resume``: where it may go on."""
        self._reuse, self._resume = reuse, resume or AnyPosition()
        self._known: dict[int, tuple[int, ...]] = {}
        """Tokens that a row holds; the last remembered stands last."""
        self._kept: set[int] = set()
        """Rows whose sequences have ended and will probably go on."""

    def num_cached(self, token_ids: tuple[int, ...]) -> int:
        return self._best_source(set(), token_ids)[1]

    def allocate(self, sequences: ListOf[Sequence], free: list[int], lookahead: int) -> Allocation:
        token_ids, unused = sequences[0].prefill_ids, set(free)
        is_scored = sequences[0].request.hints.scores_prompt
        source, reused = (None, 0) if is_scored else self._best_source(unused, token_ids)
        # Rows that no sequence will go on from, from the lowest; then what was kept longest ago.
        order = sorted(unused - self._kept) + [row for row in self._known if row in self._kept & unused]
        if source in order and self._known[source] == token_ids[: len(self._known[source])]:
            order.remove(source)
            order.insert(0, source)
        count = min(len(sequences), len(order))
        given_up, rows = order[:count], sorted(free)[:count]
        left, entered = [r for r in given_up if r not in rows], [r for r in rows if r not in given_up]
        copies = self._make_way(list(zip(left, entered, strict=True)))
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
        return (*((*move, length) for move in moves), *self._make_way(moves))

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

    def _make_way(self, moves: ListOf[tuple[int, int]]) -> Copies:
        """Let what is kept in a row change places with the sequence that moves there; its age stays."""
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
        """The row with the longest common beginning, and its length; a free one before one in use."""
        best, reused, most = None, FEWEST_REUSED - 1, reusable(len(token_ids))
        for row, known in self._known.items():
            # The cheap test first: most rows do not even have as much in common as the best so far.
            if known[: reused + 1] == token_ids[: reused + 1] and reused < most:
                best, reused = row, min(_common_prefix(known, token_ids), most)
            elif best is not None and row in free and best not in free and known[:reused] == token_ids[:reused]:
                best = row
        reused = 0 if best is None else next(self._resume.lengths(token_ids, reused), 0)
        return (best, reused) if reused >= FEWEST_REUSED else (None, 0)


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
