"""Who sits in which slot: plain Python, never touches a tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """Samples of one request that enter together and share one prefill of its prompt."""

    request: int
    samples: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass
class _Waiting:
    request: int
    prompt_length: int
    samples: deque[int]


class Scheduler:
    """Admission, slots and compaction.

    Decoding computes the rows ``0 .. num_rows - 1``, so a free slot below ``num_rows`` is waste:
    it is refilled first, and closed by `compaction` when nobody is waiting.
    """

    def __init__(self, num_slots: int, prefill_token_budget: int) -> None:
        self._num_slots = num_slots
        self._budget = prefill_token_budget
        self._waiting: deque[_Waiting] = deque()
        self._occupant: dict[int, tuple[int, int]] = {}

    @property
    def num_rows(self) -> int:
        """One more than the highest occupied slot."""
        return max(self._occupant, default=-1) + 1

    @property
    def num_running(self) -> int:
        """Occupied slots."""
        return len(self._occupant)

    @property
    def has_waiting(self) -> bool:
        """True while samples wait for a slot."""
        return bool(self._waiting)

    def occupied(self) -> list[int]:
        """Slots with a sequence in them, in order."""
        return sorted(self._occupant)

    def occupant(self, slot: int) -> tuple[int, int]:
        """(request, sample) in ``slot``."""
        return self._occupant[slot]

    def add(self, request: int, prompt_length: int, num_samples: int) -> None:
        """Queue all samples of a request, first come first served."""
        self._waiting.append(_Waiting(request, prompt_length, deque(range(num_samples))))

    def admit(self) -> list[Admission]:
        """Seat waiting samples in free slots, within the prefill budget.

        While others run it waits until an eighth of the slots are free: a prefill for every
        single free slot would cost more than the rows it fills.
        """
        free = self._num_slots - self.num_running
        if not self._waiting or (self._occupant and free < max(1, self._num_slots // 8)):
            return []
        vacant = iter([slot for slot in range(self._num_slots) if slot not in self._occupant])
        admissions: list[Admission] = []
        tokens = 0
        while self._waiting and free > 0:
            head = self._waiting[0]
            tokens += head.prompt_length
            if admissions and tokens > self._budget:
                break
            count = min(free, len(head.samples))
            samples = tuple(head.samples.popleft() for _ in range(count))
            slots = tuple(next(vacant) for _ in range(count))
            self._occupant.update(
                {slot: (head.request, sample) for slot, sample in zip(slots, samples, strict=True)}
            )
            admissions.append(Admission(head.request, samples, slots))
            free -= count
            if not head.samples:
                self._waiting.popleft()
        return admissions

    def release(self, slots: Sequence[int]) -> None:
        """The sequences in ``slots`` have finished."""
        for slot in slots:
            del self._occupant[slot]

    def compaction(self) -> list[tuple[int, int]]:
        """Moves (from, to) that close the holes, when nobody waits and a row in 32 idles.

        A row's move costs less than computing it once more: on a CPU a third of that at 256 x 6.
        """
        rows, running = self.num_rows, self.num_running
        if self._waiting or running == 0 or rows - running < max(1, rows // 32):
            return []
        holes = [slot for slot in range(running) if slot not in self._occupant]
        movers = [slot for slot in range(running, rows) if slot in self._occupant]
        moves = list(zip(movers, holes, strict=True))
        for source, destination in moves:
            self._occupant[destination] = self._occupant.pop(source)
        return moves

    def clear(self) -> None:
        """Forget everybody."""
        self._waiting.clear()
        self._occupant.clear()
