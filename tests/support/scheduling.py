"""The rollout engine without a model: scheduler and block manager over cells that hold tokens instead of keys.

It does what the engine does, in the same order, and looks at every cell before it would be attended to.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.inference.block_manager import RowBlocks
from megatron_rl.inference.paged_blocks import BlockPool, PagedBlocks
from megatron_rl.inference.scheduler import Chunk, Scheduler
from megatron_rl.inference.sequence import Sequence as Sample
from megatron_rl.inference.sequence import SequenceGroup, SequenceStatus
from megatron_rl.inference.snapshots import Snapshots, StateCopies
from megatron_rl.types import Hints, Place
from tests.support.generation import request

GARBAGE = -1


@dataclass(frozen=True)
class Sizes:
    """Of an engine."""

    rows: int = 4
    budget: int = 1000
    steps: int = 4
    longest: int = 64
    """Tokens of the longest sequence."""
    block_size: int = 0
    """0: every row has a block of its own."""
    blocks: int = 0
    """0: as many as the rows can fill."""
    overcommit: float = 1.0
    reuse: bool = True
    snapshots: int = 0
    """With any, layers have recurrent states."""

    @property
    def blocks_per_row(self) -> int:
        return -(-self.longest // self.block_size)


@dataclass
class Wanted:
    """A request; sample ``s`` answers ``lengths[s]`` tokens."""

    prompt: tuple[int, ...]
    limit: int
    lengths: Sequence[int]
    expected: int | None = None
    later_turn: bool = False
    goes_on: bool = False
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)


def answer(request: int, sample: int, length: int) -> tuple[int, ...]:
    """What a sample says, whatever happens to it."""
    draw = random.Random(f"{request} {sample}")
    return tuple(draw.randrange(1000) for _ in range(length))


class Twin:
    """A run of the scheduler over cells."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.blocks = self._make_blocks()
        self.scheduler = Scheduler(sizes.rows, sizes.budget, self.blocks, sizes.steps)
        units = self.blocks.pool.count + 1 if isinstance(self.blocks, PagedBlocks) else sizes.rows
        self.cells = [[GARBAGE] * (sizes.block_size or sizes.longest) for _ in range(units)]
        self.table = array("i")
        self.wanted: list[Wanted] = []
        self.groups: list[SequenceGroup] = []
        self.dropped: set[int] = set()
        self.position = [0] * sizes.rows
        self.alive = [False] * sizes.rows
        self.states: list[tuple[int, ...]] = [()] * (sizes.rows + sizes.snapshots)
        """The tokens that each row, and each snapshot, has been fed."""
        self.text: dict[int, tuple[int, ...]] = {}
        """The whole sequence in a row, up to its end."""
        self.prefilled = self.reused = self.preempted = self.decoded_rows = 0
        self.chunks: list[Chunk] = []

    def _make_blocks(self) -> RowBlocks | PagedBlocks:
        sizes = self.sizes
        resume = Snapshots(sizes.rows, sizes.snapshots) if sizes.snapshots else None
        if not sizes.block_size:
            return RowBlocks(sizes.reuse, resume)
        pool = BlockPool(sizes.blocks or sizes.rows * sizes.blocks_per_row, sizes.block_size)
        return PagedBlocks(sizes.rows, sizes.blocks_per_row, pool, sizes.reuse, sizes.overcommit, resume)

    def add(self, wanted: Wanted) -> None:
        assert len(wanted.prompt) + wanted.limit <= self.sizes.longest
        number, samples = len(self.wanted), len(wanted.lengths)
        asked = replace(
            request(wanted.prompt, samples, number, max_new_tokens=wanted.limit),
            hints=Hints(wanted.expected, wanted.goes_on), place=Place(turn=int(wanted.later_turn)),
        )  # fmt: skip
        self.groups.append(SequenceGroup(number, asked, [0] * samples))
        for sample in self.groups[number].sequences:
            self.scheduler.add(sample)
        self.wanted.append(wanted)

    def drop(self, number: int) -> None:
        """Cancel a request; its finished samples stay."""
        self.dropped.add(number)
        unfinished = [s for s in self.groups[number].sequences if s.status is not SequenceStatus.FINISHED]
        for sample in unfinished:
            if sample.status is not SequenceStatus.WAITING:
                self.alive[sample.row] = False
                self.text.pop(sample.row, None)
        for sample in unfinished:
            self.scheduler.drop(sample)

    @property
    def unfinished(self) -> bool:
        asked = (wanted for number, wanted in enumerate(self.wanted) if number not in self.dropped)
        return any(len(wanted.answers) < len(wanted.lengths) for wanted in asked)

    def step(self) -> list[int]:
        """One step of the engine; numbers of the requests that finished in it."""
        for sample in self.scheduler.make_room():
            self._save(sample)
        self.chunks = self.scheduler.plan()
        table = self.blocks.changed_table()
        self.table = self.table if table is None else table[:]
        self._prefill(self.chunks)
        if not self.scheduler.running:
            assert self.chunks or not self.unfinished, "nothing runs, nothing begins: a dead-lock"
            return []
        self._decode()
        finished = self._collect()
        self._compact()
        return finished

    # -- what the device does ------------------------------------------------------------------

    def _cell(self, row: int, position: int) -> tuple[int, int]:
        if not self.sizes.block_size:
            return row, position
        block, offset = divmod(position, self.sizes.block_size)
        return self.table[row * self.sizes.blocks_per_row + block], offset

    def _write(self, row: int, position: int, token: int) -> None:
        unit, offset = self._cell(row, position)
        self.cells[unit][offset] = token

    def _check(self, row: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens):
            unit, offset = self._cell(row, position)
            assert not self.sizes.block_size or unit > 0, "a sequence without a block"
            assert self.cells[unit][offset] == token, f"row {row} has another token at {position}"

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        length = self.sizes.block_size or max((length for _, _, length in copies), default=0)
        held = [self.cells[source][:length] for source, _, _ in copies]
        for (_, destination, _), contents in zip(copies, held, strict=True):
            self.cells[destination][:length] = contents

    def _copy_states(self, copies: StateCopies) -> None:
        for source, destination in copies:
            self.states[destination] = self.states[source]

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._copy(chunk.before)
            self._copy_states(chunk.states_before)
            for _, row, length in () if self.sizes.block_size else chunk.before:
                assert not self.alive[row]
                self.position[row] = length
        # Whole prompts and first chunks, then those that begin in the cache.
        for chunk in sorted(chunks, key=lambda chunk: chunk.start > 0):
            self._check(chunk.rows[0], chunk.token_ids[: chunk.start])
            has_state = not self.sizes.snapshots or not chunk.start
            assert has_state or self.states[chunk.rows[0]] == chunk.token_ids[: chunk.start]
            self.states[chunk.rows[0]] = chunk.token_ids[: chunk.end]
            for position in range(chunk.start, chunk.end):
                self._write(chunk.rows[0], position, chunk.token_ids[position])
            self.prefilled += chunk.num_tokens
            self.reused += chunk.reused
            if not chunk.is_last:
                for row in chunk.rows:
                    self.alive[row], self.position[row] = False, len(chunk.token_ids) - 1
                continue
            self._copy(chunk.after)
            self._copy_states(tuple((chunk.rows[0], row) for row in chunk.rows))
            for sample in chunk.sequences:
                row, number = sample.row, sample.group.number
                wanted = self.wanted[number]
                self.text[row] = wanted.prompt + answer(number, sample.sample, wanted.lengths[sample.sample])
                assert chunk.token_ids == self.text[row][: len(chunk.token_ids)]
                self.position[row] = len(chunk.token_ids)
                self.alive[row] = self.position[row] + 1 < len(self.text[row])
        for chunk in chunks:
            self._copy_states(chunk.states_after)

    def _decode(self) -> None:
        running = self.scheduler.running
        rows = self.scheduler.num_rows
        steps = min(self.sizes.steps, max(sample.remaining for sample in running))
        for _ in range(steps):
            self.decoded_rows += rows
            for row in range(rows):
                position = self.position[row]
                token = self.text[row][position] if self.alive[row] else GARBAGE
                self._write(row, position, token)
                if self.alive[row]:
                    self._check(row, self.text[row][: position + 1])
                    self.position[row] += 1
                    self.states[row] += (token,)
                    self.alive[row] = self.position[row] + 1 < len(self.text[row])
        for sample in running:
            sample.num_generated += steps

    # -- what the host does --------------------------------------------------------------------

    def _collect(self) -> list[int]:
        finished = []
        for sample in self.scheduler.running:
            if self.alive[sample.row]:
                continue
            text = self.text.pop(sample.row)
            new = text[len(sample.prefill_ids) :]
            sample.append(new, (0.0,) * len(new))
            sample.finish("stop")
            sample.num_cut = len(text) % 2
            if sample.num_cut:  # the host found an end behind which the row had gone on
                self.states[sample.row] += (GARBAGE,)
            self._copy_states(self.scheduler.free(sample))
            wanted = self.wanted[sample.group.number]
            assert sample.sample not in wanted.answers, "a sample finished twice"
            wanted.answers[sample.sample] = text[len(wanted.prompt) :]
            if not sample.group.open_sequences:
                finished.append(sample.group.number)
        return finished

    def _save(self, sample: Sample) -> None:
        self.preempted += 1
        assert self.alive[sample.row]
        assert sample.position == self.position[sample.row]
        self.alive[sample.row] = False
        new = self.text.pop(sample.row)[len(sample.prefill_ids) : sample.position + 1]
        assert len(new) == sample.num_unread
        sample.append(new, (0.0,) * len(new))

    def _compact(self) -> None:
        moves, copies = self.scheduler.compact()
        for source, destination in moves:
            for column in (self.position, self.alive):
                column[source], column[destination] = column[destination], column[source]
            self.text[destination] = self.text.pop(source) if source in self.text else ()
        self._copy_states(tuple(moves))
        self._copy(copies)
