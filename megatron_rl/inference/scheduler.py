"""Assign batch rows to sequences and choose the prompt chunks to compute next. Plain Python, no tensors."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from megatron_rl.inference.block_manager import Allocation, BlockManager, Copies
from megatron_rl.inference.engine import EngineLoad
from megatron_rl.inference.sequence import Sequence, SequenceStatus
from megatron_rl.inference.snapshots import StateCopies


@dataclass(frozen=True)
class Chunk:
    """A range of a prompt, computed in the row of the first of the ``sequences`` that share it."""

    sequences: tuple[Sequence, ...]
    token_ids: tuple[int, ...]
    """The whole prompt."""
    start: int
    end: int
    reused: int = 0
    """Cached prompt tokens; only in the first chunk of a prompt."""
    before: Copies = ()
    """Copies in the cache before the pass."""
    after: Copies = ()
    """Copies of the finished prompt to the other sequences."""
    states_before: StateCopies = ()
    """Copy of the recurrent states at the end of the cached prefix."""
    states_after: StateCopies = ()
    """Copy that snapshots the recurrent states at the end of the prompt."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(sequence.row for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """True for the last chunk of a prompt: its sequences draw their first tokens."""
        return self.end == len(self.token_ids)


class Scheduler:
    """Admission, chunked prefill, preemption, compaction.

    Decode steps compute the rows ``0 .. num_rows - 1``, so free rows below ``num_rows`` are waste: they are refilled
    first, and closed by `compact` when the queue is empty.
    """

    def __init__(self, max_rows: int, prefill_token_budget: int, blocks: BlockManager, lookahead: int = 1) -> None:
        """``lookahead``: tokens drawn between two host reads; each running sequence needs blocks for them."""
        self._max_rows = max_rows
        self._lookahead = lookahead
        self._budget = prefill_token_budget
        self._blocks = blocks
        self._waiting: list[Sequence] = []
        """Sorted by priority."""
        self._rows: dict[int, Sequence] = {}
        self._prefills: list[tuple[list[Sequence], Iterator[Chunk]]] = []
        """Partly computed prompts: their sequences and remaining chunks."""
        self._lacks_blocks = False  # the first in the queue waits for blocks, not for a row

    @property
    def running(self) -> list[Sequence]:
        """The decoding sequences, by row."""
        sequences = (self._rows[row] for row in sorted(self._rows))
        return [sequence for sequence in sequences if sequence.status is SequenceStatus.RUNNING]

    @property
    def num_rows(self) -> int:
        """One more than the highest decoding row."""
        return max((row for row, s in self._rows.items() if s.status is SequenceStatus.RUNNING), default=-1) + 1

    @property
    def load(self) -> EngineLoad:
        """Return queue length and block usage; thread-safe, because it reads only lengths."""
        return EngineLoad(len(self._rows), len(self._waiting), *self._blocks.usage)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by priority."""
        bisect.insort(self._waiting, sequence, key=lambda entry: entry.priority)

    # -- prompts -------------------------------------------------------------------------------

    def plan(self) -> list[Chunk]:
        """Choose what to prefill: the next chunks of started prompts, then new prompts within the budget.

        While sequences run, new prompts wait until an eighth of the rows is free: a prefill for every free row would
        cost more than the idle rows.
        """
        self._lacks_blocks = False
        chunks = [next(rest) for _, rest in self._prefills]
        left = self._budget - sum(chunk.num_tokens for chunk in chunks)
        if not self._rows or self._max_rows - len(self._rows) >= max(1, self._max_rows // 8):
            while self._waiting and left > 0 and len(self._rows) < self._max_rows:
                chunk = self._admit(left, alone=not chunks)
                if chunk is None:
                    break
                chunks.append(chunk)
                left -= chunk.num_tokens
        for place, chunk in enumerate(chunks):
            if chunk.is_last:
                kept = self._blocks.remember(chunk.sequences, chunk.token_ids)
                chunks[place] = replace(chunk, states_after=kept) if kept else chunk
        self._prefills = [entry for entry in self._prefills if entry[0][0].status is SequenceStatus.PREFILL]
        return chunks

    def _admit(self, left: int, alone: bool) -> Chunk | None:
        """Admit the first in the queue and those that share its prompt; None if it has to wait."""
        first = self._waiting[0]
        token_ids = first.prefill_ids
        if not alone and len(token_ids) - self._blocks.num_cached(token_ids) > left:
            return None
        free = [row for row in range(self._max_rows) if row not in self._rows]
        # A sequence with drawn tokens does not share its prompt.
        most, priority = 1 if first.num_generated else len(free), first.priority
        candidates = list(takewhile(
            lambda s: s.group is first.group and s.priority == priority, islice(self._waiting, most)
        ))  # fmt: skip
        allocation = self._blocks.allocate(candidates, free, self._lookahead)
        if allocation is None:
            self._lacks_blocks = True
            return None
        admitted = candidates[: allocation.count]
        del self._waiting[: allocation.count]
        for sequence in admitted:
            sequence.status = SequenceStatus.PREFILL
            self._rows[sequence.row] = sequence
        rest = self._chunks(admitted, allocation)
        self._prefills.append((admitted, rest))
        return next(rest)

    def _chunks(self, sequences: list[Sequence], allocation: Allocation) -> Iterator[Chunk]:
        """Yield chunks of the prompt, of equal size: a short last one could use other kernels.

        When the last chunk is yielded, the sequences count their first token.
        """
        token_ids, reused = sequences[0].prefill_ids, allocation.reused
        length = len(token_ids)
        size = math.ceil((length - reused) / math.ceil((length - reused) / self._budget))
        for start in range(reused, length, size):
            end = min(start + size, length)
            is_first, is_last = start == reused, end == length
            if is_last:
                for sequence in sequences:
                    sequence.status = SequenceStatus.RUNNING
                    sequence.num_generated += 1
            yield Chunk(
                tuple(sequences), token_ids, start, end,
                reused=reused if is_first else 0,
                before=allocation.copies if is_first else (),
                after=self._blocks.share(sequences, length) if is_last else (),
                states_before=allocation.states if is_first else (),
            )  # fmt: skip

    # -- decoding ------------------------------------------------------------------------------

    def make_room(self) -> list[Sequence]:
        """Provide blocks until the next host read; return the running sequences preempted for them.

        The sequence with the fewest generated tokens is preempted first, the one with the most never, so that work
        always finishes. The tokens of the preempted ones are still to be read from their rows.
        """
        preempted: list[Sequence] = []
        for sequence in sorted(self.running, key=lambda s: (-s.num_generated, s.row)):
            while sequence.status is SequenceStatus.RUNNING:  # until it has blocks, or is preempted itself
                drawn = min(self._lookahead, sequence.remaining)
                if self._blocks.extend(sequence, sequence.position + drawn):
                    break
                preempted += self._preempt(min(self._rows.values(), key=lambda s: (s.num_generated, -s.row)))
        for sequence in preempted:
            self.add(sequence)
        return preempted

    def _preempt(self, victim: Sequence) -> list[Sequence]:
        if victim.status is SequenceStatus.RUNNING:
            self._release(victim, victim.prefill_ids)
            victim.preempt()
            return [victim]
        prefill = next(entry for entry in self._prefills if victim in entry[0])
        self._prefills.remove(prefill)
        for sequence in prefill[0]:
            self._release(sequence, ())
            sequence.preempt()
            self.add(sequence)
        return []

    def free(self, sequence: Sequence) -> StateCopies:
        """Release a finished sequence, whose last token was drawn but not fed.

        Returns the copy that snapshots its recurrent states; none if the host cut tokens that the states include.
        """
        return self._release(sequence, sequence.prefill_ids[:-1], is_turn=sequence.num_cut == 0)

    def drop(self, sequence: Sequence) -> None:
        """Remove an unfinished sequence, without reading its tokens."""
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence, sequence.prefill_ids)
            return
        if sequence.status is SequenceStatus.PREFILL:
            self._preempt(sequence)  # with those that share its prompt: all wait again
        self._waiting.remove(sequence)

    def compact(self) -> tuple[list[tuple[int, int]], Copies]:
        """Close holes between rows; return the moves (from, to) and the copies in the cache.

        Empty if a waiting sequence can fill the holes, or fewer than 1 in 32 rows idle: moving a row costs less than
        computing it once more, on a CPU a third of that at 256 x 6.
        """
        rows, taken = self.num_rows, len(self._rows)
        if (self._waiting and not self._lacks_blocks) or taken == 0 or rows - taken < max(1, rows // 32):
            return [], ()
        holes = [row for row in range(taken) if row not in self._rows]
        movers = [row for row in sorted(self._rows) if row >= taken]
        moves = list(zip(movers, holes, strict=True))
        moved = [self._rows.pop(row) for row in movers]
        for sequence, row in zip(moved, holes, strict=True):
            sequence.row = row
            self._rows[row] = sequence
        longest = max((len(s.prefill_ids) + s.num_unread for s in moved), default=0)
        return moves, self._blocks.move(moves, longest) if moves else ()

    def clear(self) -> None:
        """Remove all sequences."""
        self._waiting.clear()
        self._rows.clear()
        self._prefills.clear()
        self._lacks_blocks = False
        self._blocks.clear()

    def _release(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        """Free row and blocks; the cache holds ``token_ids`` of the sequence."""
        del self._rows[sequence.row]
        return self._blocks.free(sequence, token_ids, is_turn)
