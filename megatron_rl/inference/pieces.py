"""Seats, and prompts on their way into the cache piece by piece. Plain Python."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from megatron_rl.inference.storage import Copies, Entry, Storage
from megatron_rl.inference.waiting import PREEMPTED, Waiting


@dataclass
class Seat:
    """One sample in a slot, as far as the host knows it without reading the device."""

    slot: int
    request: int
    sample: int
    tokens: tuple[int, ...]
    """What was prefilled: the prompt, and what the sample had said before it was pre-empted."""
    remaining: int
    """Tokens it may still draw."""
    goes_on: bool = False
    """It will probably be asked again."""
    earlier: int = 0
    """Tokens it had drawn before it was pre-empted."""
    drawn: int = 0
    """Tokens drawn since the prefill; 0 while it is being prefilled. A row that has ended counts on until it is
    read."""

    @property
    def position(self) -> int:
        """Of the last token drawn, which is fed next."""
        return len(self.tokens) + self.drawn - 1

    @property
    def said(self) -> int:
        """Tokens drawn so far."""
        return self.earlier + self.drawn

    def advance(self, steps: int) -> None:
        """So many tokens are drawn."""
        self.drawn += steps
        self.remaining -= steps


@dataclass(frozen=True)
class Piece:
    """A stretch of a prompt, computed in the first of its ``slots``."""

    request: int
    samples: tuple[int, ...]
    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    """The whole prompt."""
    start: int
    end: int
    most_new: int
    returning: bool = False
    """The sample was pre-empted, so this was computed before."""
    reused: int = 0
    """Tokens of the prompt that the cache held already; counted once, with the first piece."""
    before: Copies = Copies()
    """Copies in the cache that come first."""
    after: Copies = Copies()
    """Copies that give the finished prompt to the other slots."""

    @property
    def is_last(self) -> bool:
        """The prompt is complete and its samples draw their first tokens."""
        return self.end == len(self.tokens)


class Prefilling:
    """Samples of one prompt that have their seats, and how much of the prompt is computed."""

    def __init__(self, waiting: Waiting, seats: list[Seat], entry: Entry, budget: int) -> None:
        """At most ``budget`` tokens a piece."""
        self.seats = seats
        self._waiting = waiting
        self._entry = entry
        self._done = entry.reused
        # Pieces of one size: a short last one would take another way through the processor.
        missing = len(waiting.tokens) - entry.reused
        self._size = math.ceil(missing / math.ceil(missing / budget))

    @property
    def is_done(self) -> bool:
        """The samples draw."""
        return self._done == len(self._waiting.tokens)

    def next_piece(self, storage: Storage) -> Piece:
        """What is computed now; with the last piece the samples have drawn their first tokens."""
        waiting, slots = self._waiting, tuple(seat.slot for seat in self.seats)
        start, end = self._done, min(self._done + self._size, len(waiting.tokens))
        entry = self._entry if start == self._entry.reused else Entry(slots)
        self._done = end
        if self.is_done:
            for seat in self.seats:
                seat.advance(1)
        return Piece(
            request=waiting.request,
            samples=tuple(seat.sample for seat in self.seats),
            slots=slots,
            tokens=waiting.tokens,
            start=start,
            end=end,
            most_new=waiting.most_new,
            returning=waiting.urgency == PREEMPTED,
            reused=entry.reused,
            before=entry.copies,
            after=storage.share(slots, end) if self.is_done else Copies(),
        )

    def given_up(self) -> Waiting:
        """The samples go back to the queue and begin anew."""
        return replace(self._waiting, samples=deque(seat.sample for seat in self.seats), urgency=PREEMPTED)
