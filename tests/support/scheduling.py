"""The rollout engine without a model: scheduler and books of the cache over cells that hold tokens instead of keys.

It does what the engine does, in the same order, and looks at every cell before it would be attended to.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.inference.blocks import PagePool
from megatron_rl.inference.page_storage import PageStorage
from megatron_rl.inference.pieces import Piece, Seat
from megatron_rl.inference.scheduler import Scheduler
from megatron_rl.inference.slot_storage import SlotStorage
from megatron_rl.inference.storage import Copies
from megatron_rl.inference.waiting import LATER_TURN, PREEMPTED, Waiting

GARBAGE = -1


@dataclass(frozen=True)
class Sizes:
    """Of an engine."""

    slots: int = 4
    budget: int = 1000
    steps: int = 4
    longest: int = 64
    """Tokens of the longest sequence."""
    page_length: int = 0
    """0: slots."""
    pages: int = 0
    """0: as many as the slots can fill."""
    overcommit: float = 1.0
    reuse: bool = True

    @property
    def pages_per_slot(self) -> int:
        return -(-self.longest // self.page_length)


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
        self.storage = self._make_storage()
        self.scheduler = Scheduler(sizes.slots, sizes.budget, self.storage, sizes.steps)
        units = sizes.slots if not sizes.page_length else self.storage._pool.count + 1
        self.cells = [[GARBAGE] * (sizes.page_length or sizes.longest) for _ in range(units)]
        self.wanted: list[Wanted] = []
        self.position = [0] * sizes.slots
        self.alive = [False] * sizes.slots
        self.ends = [0] * sizes.slots
        self.text: dict[int, tuple[int, ...]] = {}
        """The whole sequence in a slot, up to its end."""
        self.prefilled = self.reused = self.preempted = self.decoded_rows = 0
        self.pieces: list[Piece] = []

    def _make_storage(self) -> SlotStorage | PageStorage:
        sizes = self.sizes
        if not sizes.page_length:
            return SlotStorage(sizes.reuse)
        pool = PagePool(sizes.pages or sizes.slots * sizes.pages_per_slot, sizes.page_length)
        return PageStorage(sizes.slots, sizes.pages_per_slot, pool, sizes.reuse, sizes.overcommit)

    def add(self, wanted: Wanted) -> None:
        assert len(wanted.prompt) + wanted.limit <= self.sizes.longest
        urgency = {"urgency": LATER_TURN} if wanted.later_turn else {}
        samples = deque(range(len(wanted.lengths)))
        expected = wanted.expected or wanted.limit
        self.scheduler.add(
            Waiting(len(self.wanted), wanted.prompt, samples, wanted.limit, expected, goes_on=wanted.goes_on, **urgency)
        )
        self.wanted.append(wanted)

    @property
    def unfinished(self) -> bool:
        return any(len(wanted.answers) < len(wanted.lengths) for wanted in self.wanted)

    def step(self) -> list[int]:
        """One step of the engine; numbers of the requests that finished in it."""
        for seat in self.scheduler.make_room():
            self._put_back(seat)
        self.pieces = self.scheduler.plan()
        self._prefill(self.pieces)
        if not self.scheduler.has_running:
            assert self.pieces or not self.unfinished, "nothing runs, nothing begins: a dead-lock"
            return []
        self._decode()
        finished = self._collect()
        self._compact()
        return finished

    # -- what the device does ------------------------------------------------------------------

    def _cell(self, slot: int, position: int) -> tuple[int, int]:
        if not self.sizes.page_length:
            return slot, position
        page, offset = divmod(position, self.sizes.page_length)
        return self.storage.table[slot * self.sizes.pages_per_slot + page], offset

    def _write(self, slot: int, position: int, token: int) -> None:
        unit, offset = self._cell(slot, position)
        self.cells[unit][offset] = token

    def _check(self, slot: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens):
            unit, offset = self._cell(slot, position)
            assert not self.sizes.page_length or unit > 0, "a sequence without a page"
            assert self.cells[unit][offset] == token, f"slot {slot} has another token at {position}"

    def _copy(self, several: Sequence[Copies]) -> None:
        pairs = [pair for copies in several for pair in copies.pairs]
        length = self.sizes.page_length or max((copies.length for copies in several), default=0)
        held = [self.cells[source][:length] for source, _ in pairs]
        for (_, destination), contents in zip(pairs, held, strict=True):
            self.cells[destination][:length] = contents

    def _prefill(self, pieces: Sequence[Piece]) -> None:
        self._copy([piece.before for piece in pieces])
        # Whole prompts and first pieces, then those that begin in the cache.
        for piece in sorted(pieces, key=lambda piece: piece.start > 0):
            self._check(piece.slots[0], piece.tokens[: piece.start])
            for position in range(piece.start, piece.end):
                self._write(piece.slots[0], position, piece.tokens[position])
            self.prefilled += piece.end - piece.start
            self.reused += piece.reused
            if not piece.is_last:
                for slot in piece.slots:
                    self.alive[slot], self.position[slot] = False, len(piece.tokens) - 1
                continue
            self._copy([piece.after])
            for slot, sample in zip(piece.slots, piece.samples, strict=True):
                wanted = self.wanted[piece.request]
                self.text[slot] = wanted.prompt + answer(piece.request, sample, wanted.lengths[sample])
                assert piece.tokens == self.text[slot][: len(piece.tokens)]
                self.position[slot] = len(piece.tokens)
                self.alive[slot] = self.position[slot] + 1 < len(self.text[slot])

    def _decode(self) -> None:
        running = self.scheduler.running()
        rows = self.scheduler.num_rows
        steps = min(self.sizes.steps, max(seat.remaining for seat in running))
        for _ in range(steps):
            self.decoded_rows += rows
            for slot in range(rows):
                position = self.position[slot]
                token = self.text[slot][position] if self.alive[slot] else GARBAGE
                self._write(slot, position, token)
                if self.alive[slot]:
                    self._check(slot, self.text[slot][: position + 1])
                    self.position[slot] += 1
                    self.alive[slot] = self.position[slot] + 1 < len(self.text[slot])
        self.scheduler.advance(steps)

    # -- what the host does --------------------------------------------------------------------

    def _collect(self) -> list[int]:
        finished = []
        for seat in self.scheduler.running():
            if self.alive[seat.slot]:
                continue
            text = self.text.pop(seat.slot)
            self.scheduler.release(seat.slot, text[:-1])
            wanted = self.wanted[seat.request]
            assert seat.sample not in wanted.answers, "a sample finished twice"
            wanted.answers[seat.sample] = text[len(wanted.prompt) :]
            if len(wanted.answers) == len(wanted.lengths):
                finished.append(seat.request)
        return finished

    def _put_back(self, seat: Seat) -> None:
        self.preempted += 1
        assert self.alive[seat.slot]
        assert seat.position == self.position[seat.slot]
        self.alive[seat.slot] = False
        said = self.text.pop(seat.slot)[len(seat.tokens) : seat.position + 1]
        assert len(said) == seat.drawn
        self.scheduler.add(
            Waiting(
                seat.request, seat.tokens + said, deque([seat.sample]), seat.remaining, seat.remaining, PREEMPTED,
                seat.goes_on, seat.said,
            )
        )  # fmt: skip

    def _compact(self) -> None:
        moves = self.scheduler.compaction()
        if not moves:
            return
        length = self.scheduler.longest([slot for _, slot in moves])
        for source, destination in moves:
            for column in (self.position, self.alive):
                column[source], column[destination] = column[destination], column[source]
            self.text[destination] = self.text.pop(source) if source in self.text else ()
        self._copy([self.storage.move(moves, length)])
