"""Who sits in which slot, and which stretches of prompts are computed next: plain Python, never touches a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.inference.pieces import Piece, Prefilling, Seat
from megatron_rl.inference.storage import Need, Storage
from megatron_rl.inference.waiting import PREEMPTED, Queue, Waiting


class Scheduler:
    """Admission, pieces of prompts, room in the cache, compaction.

    Decoding computes the rows ``0 .. num_rows - 1``, so a free slot below ``num_rows`` is waste:
    it is refilled first, and closed by `compaction` when nobody is waiting.
    """

    def __init__(
        self, num_slots: int, prefill_token_budget: int, storage: Storage, steps_per_host_read: int = 1
    ) -> None:
        self._num_slots = num_slots
        self._steps = steps_per_host_read
        self._budget = prefill_token_budget
        self._storage = storage
        self._queue = Queue()
        self._seats: dict[int, Seat] = {}
        self._prefilling: list[Prefilling] = []
        self._refused = False  # the head of the queue waits for room in the cache, not for a slot

    @property
    def num_rows(self) -> int:
        """One more than the highest slot that decodes."""
        return max((slot for slot, seat in self._seats.items() if seat.drawn), default=-1) + 1

    @property
    def has_waiting(self) -> bool:
        """True while samples wait for a slot."""
        return len(self._queue) > 0

    @property
    def has_running(self) -> bool:
        """True while a slot decodes."""
        return any(seat.drawn for seat in self._seats.values())

    def running(self) -> list[Seat]:
        """Who decodes, in the order of slots."""
        return [self._seats[slot] for slot in sorted(self._seats) if self._seats[slot].drawn]

    def seat(self, slot: int) -> Seat:
        """Who sits in ``slot``."""
        return self._seats[slot]

    def add(self, waiting: Waiting) -> None:
        """Queue samples of one prompt."""
        self._queue.add(waiting)

    # -- prompts -------------------------------------------------------------------------------

    def plan(self) -> list[Piece]:
        """What to prefill now: the pieces of prompts under way, then new ones within the budget.

        While others run it waits until an eighth of the slots are free: a prefill for every
        single free slot would cost more than the rows it fills.
        """
        self._refused = False
        pieces = [group.next_piece(self._storage) for group in self._prefilling]
        left = self._budget - sum(piece.end - piece.start for piece in pieces)
        free = self._num_slots - len(self._seats)
        if free >= max(1, self._num_slots // 8) or not self._seats:
            while self._queue and left > 0 and len(self._seats) < self._num_slots:
                piece = self._admit(left, alone=not pieces)
                if piece is None:
                    break
                pieces.append(piece)
                left -= piece.end - piece.start
        for piece in pieces:
            if piece.is_last:
                self._storage.learn(piece.slots, piece.tokens)
        self._prefilling = [group for group in self._prefilling if not group.is_done]
        return pieces

    def _admit(self, left: int, alone: bool) -> Piece | None:
        """The head of the queue takes its seats; None when it has to wait."""
        head = self._queue.head
        length = len(head.tokens)
        vacant = [slot for slot in range(self._num_slots) if slot not in self._seats]
        if not alone and length - self._storage.cached(head.tokens) > left:
            return None
        # The last token that is drawn is not fed, so it takes no room.
        longest, expected = length + head.most_new - 1, length + head.expected_new - 1
        need = Need(min(length + self._steps, longest), longest, expected, head.urgency == PREEMPTED)
        entry = self._storage.enter(vacant, head.tokens, len(head.samples), need)
        if entry is None:
            self._refused = True
            return None
        samples = self._queue.take(len(entry.slots))
        seats = [
            Seat(slot, head.request, sample, head.tokens, head.most_new, head.goes_on, head.earlier)
            for slot, sample in zip(entry.slots, samples, strict=True)
        ]
        self._seats.update({seat.slot: seat for seat in seats})
        self._prefilling.append(Prefilling(head, seats, entry, self._budget))
        return self._prefilling[-1].next_piece(self._storage)

    # -- decoding ------------------------------------------------------------------------------

    def make_room(self) -> list[Seat]:
        """Room for what everybody draws before the host looks again; who has to leave for it.

        Whoever has said least leaves; whoever has said most never does, so work is finished in the end. Those who
        were decoding come back by `add` with what they have said; prompts under way go back by themselves.
        """
        left: list[Seat] = []
        for seat in sorted(self.running(), key=lambda seat: (-seat.said, seat.slot)):
            while self._seats.get(seat.slot) is seat:  # until it has room, or has to leave itself
                if self._storage.grow(seat.slot, seat.position + min(self._steps, seat.remaining)):
                    break
                left += self._preempt(min(self._seats.values(), key=lambda seat: (seat.said, -seat.slot)))
        return left

    def _preempt(self, victim: Seat) -> list[Seat]:
        if victim.drawn:
            self.release(victim.slot, victim.tokens)
            return [victim]
        group = next(group for group in self._prefilling if victim in group.seats)
        self._prefilling.remove(group)
        for seat in group.seats:
            self.release(seat.slot, ())
        self._queue.add(group.given_up())
        return []

    def advance(self, steps: int) -> None:
        """Everybody who decodes has drawn ``steps`` tokens."""
        for seat in self.running():
            seat.advance(steps)

    def release(self, slot: int, tokens: Sequence[int]) -> Seat:
        """The sequence in ``slot`` has ended; the cache holds its ``tokens``."""
        seat = self._seats.pop(slot)
        self._storage.leave(slot, tokens, seat.goes_on)
        return seat

    def longest(self, slots: Sequence[int]) -> int:
        """Tokens in the cache of the longest of the sequences in ``slots``."""
        return max(len(self._seats[slot].tokens) + self._seats[slot].drawn for slot in slots)

    def compaction(self) -> list[tuple[int, int]]:
        """Moves (from, to) that close the holes, when nobody is about to fill them and a row in 32 idles.

        A row's move costs less than computing it once more: on a CPU a third of that at 256 x 6.
        """
        rows, seated = self.num_rows, len(self._seats)
        if (self._queue and not self._refused) or seated == 0 or rows - seated < max(1, rows // 32):
            return []
        holes = [slot for slot in range(seated) if slot not in self._seats]
        movers = [slot for slot in sorted(self._seats) if slot >= seated]
        moves = list(zip(movers, holes, strict=True))
        for source, destination in moves:
            seat = self._seats.pop(source)
            seat.slot = destination
            self._seats[destination] = seat
        return moves

    def clear(self) -> None:
        """Forget everybody."""
        self._queue.clear()
        self._seats.clear()
        self._prefilling.clear()
        self._refused = False
        self._storage.clear()
