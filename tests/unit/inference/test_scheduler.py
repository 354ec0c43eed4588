"""Admission, refill and compaction: who sits where."""

from __future__ import annotations

from collections import deque

import pytest

from megatron_rl.inference.pieces import Piece
from megatron_rl.inference.scheduler import Scheduler
from megatron_rl.inference.slot_storage import SlotStorage
from megatron_rl.inference.waiting import FIRST_TURN, LATER_TURN, PREEMPTED, Waiting


def scheduler(num_slots: int, budget: int = 1000) -> Scheduler:
    return Scheduler(num_slots, budget, SlotStorage())


def add(
    plan: Scheduler,
    request: int,
    prompt_length: int = 1,
    samples: int = 1,
    new: int = 100,
    expected: int | None = None,
    urgency: int = FIRST_TURN,
) -> None:
    """Prompts of different requests have no token in common."""
    prompt = tuple(1000 * request + i for i in range(prompt_length))
    plan.add(Waiting(request, prompt, deque(range(samples)), new, expected or new, urgency))


def seated(pieces: list[Piece]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [(piece.request, piece.samples, piece.slots) for piece in pieces]


def occupants(plan: Scheduler) -> dict[int, tuple[int, int]]:
    return {seat.slot: (seat.request, seat.sample) for seat in plan.running()}


def release(plan: Scheduler, slots: list[int]) -> None:
    for slot in slots:
        plan.release(slot, ())


# -- who is next -------------------------------------------------------------------------------


def test_equals_are_served_as_they_come_in_the_lowest_slots() -> None:
    plan = scheduler(8)
    add(plan, 0, 5, samples=2)
    add(plan, 1, 5, samples=3)
    assert seated(plan.plan()) == [(0, (0, 1), (0, 1)), (1, (0, 1, 2), (2, 3, 4))]
    assert plan.num_rows == 5
    assert not plan.has_waiting
    assert occupants(plan) == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (1, 2)}


def test_the_longest_begin_first() -> None:
    plan = scheduler(8)
    for request, (new, expected) in enumerate([(10, 10), (90, 20), (50, 50), (90, 20)]):
        add(plan, request, new=new, expected=expected)
    assert [piece.request for piece in plan.plan()] == [2, 1, 3, 0]


def test_begun_work_and_conversations_before_everybody_else() -> None:
    plan = scheduler(8)
    add(plan, 0, new=100)
    add(plan, 1, new=5, urgency=LATER_TURN)
    add(plan, 2, new=3, urgency=PREEMPTED)
    add(plan, 3, new=7, urgency=LATER_TURN)
    assert [piece.request for piece in plan.plan()] == [2, 3, 1, 0]


def test_a_group_larger_than_the_slots_enters_in_parts() -> None:
    plan = scheduler(4)
    add(plan, 7, 5, samples=10)
    seen = []
    while plan.has_waiting:
        (piece,) = plan.plan()
        seen += piece.samples
        release(plan, list(piece.slots))
    assert seen == list(range(10))


def test_freed_slots_are_refilled_before_new_rows_open() -> None:
    plan = scheduler(8)
    add(plan, 0, samples=6)
    plan.plan()
    release(plan, [1, 4])
    add(plan, 1, samples=3)
    assert seated(plan.plan()) == [(1, (0, 1, 2), (1, 4, 6))]


@pytest.mark.parametrize(("released", "admitted"), [(1, 0), (2, 2)])
def test_a_running_batch_waits_for_an_eighth_of_the_slots(released: int, admitted: int) -> None:
    plan = scheduler(16)
    add(plan, 0, samples=20)
    plan.plan()
    release(plan, list(range(released)))
    assert sum(len(piece.samples) for piece in plan.plan()) == admitted


def test_an_empty_batch_never_waits() -> None:
    plan = scheduler(16)
    add(plan, 0)
    assert seated(plan.plan()) == [(0, (0,), (0,))]


def test_with_few_slots_one_free_slot_is_enough() -> None:
    plan = scheduler(3)
    add(plan, 0, samples=4)
    plan.plan()
    release(plan, [2])
    assert seated(plan.plan()) == [(0, (3,), (2,))]


# -- pieces of prompts -------------------------------------------------------------------------


def test_the_prefill_budget_counts_a_prompt_once_per_group() -> None:
    plan = scheduler(16, budget=10)
    for request in range(3):
        add(plan, request, 5, samples=4)
    assert [piece.request for piece in plan.plan()] == [0, 1]
    assert [piece.request for piece in plan.plan()] == [2]


def test_a_prompt_that_fits_the_budget_is_never_cut() -> None:
    """It waits for a step of its own: packed whole, it is computed as the trainer computes it."""
    plan = scheduler(16, budget=10)
    add(plan, 0, 7)
    add(plan, 1, 9)
    assert [(p.request, p.start, p.end) for p in plan.plan()] == [(0, 0, 7)]
    assert [(p.request, p.start, p.end) for p in plan.plan()] == [(1, 0, 9)]


def test_a_longer_prompt_is_cut_into_pieces_of_one_size() -> None:
    plan = scheduler(16, budget=10)
    add(plan, 0, 1, samples=2)
    add(plan, 1, 23, samples=3)
    add(plan, 2, 2)
    assert [(p.request, p.start, p.end) for p in plan.plan()] == [(0, 0, 1)]
    pieces = [plan.plan() for _ in range(3)]
    # What the pieces leave of the budget goes to the next prompts.
    assert [[(p.request, p.start, p.end) for p in step] for step in pieces] == [
        [(1, 0, 8), (2, 0, 2)],
        [(1, 8, 16)],
        [(1, 16, 23)],
    ]
    assert [step[0].is_last for step in pieces] == [False, False, True]
    assert all(step[0].slots == (2, 3, 4) for step in pieces)
    assert plan.plan() == []


def test_a_prompt_under_way_is_not_decoded() -> None:
    plan = scheduler(8, budget=10)
    add(plan, 0, 15, samples=2)
    plan.plan()
    assert plan.num_rows == 0
    assert not plan.has_running
    plan.plan()
    assert plan.num_rows == 2
    assert [(seat.position, seat.remaining) for seat in plan.running()] == [(15, 99), (15, 99)]


# -- rows --------------------------------------------------------------------------------------


def test_compaction_moves_the_highest_rows_into_the_holes() -> None:
    plan = scheduler(8)
    add(plan, 0, samples=8)
    plan.plan()
    release(plan, [0, 2, 3])
    assert plan.compaction() == [(5, 0), (6, 2), (7, 3)]
    assert plan.num_rows == 5
    assert occupants(plan) == {0: (0, 5), 1: (0, 1), 2: (0, 6), 3: (0, 7), 4: (0, 4)}
    assert plan.compaction() == []


def test_no_compaction_while_somebody_waits() -> None:
    plan = scheduler(32)
    add(plan, 0, samples=33)
    plan.plan()
    release(plan, [0, 1, 2, 3])
    assert plan.compaction() == []  # sample 32 waits for a slot
    plan.plan()
    assert plan.compaction() == [(29, 1), (30, 2), (31, 3)]


def test_no_compaction_where_little_is_won() -> None:
    plan = scheduler(128)
    add(plan, 0, samples=128)
    plan.plan()
    release(plan, [0, 1, 2])
    assert plan.compaction() == []  # three idle rows of 128 are less than one in 32
    release(plan, [20])
    assert plan.compaction() == [(124, 0), (125, 1), (126, 2), (127, 20)]


def test_free_slots_at_the_end_are_no_holes() -> None:
    plan = scheduler(8)
    add(plan, 0, samples=8)
    plan.plan()
    release(plan, [4, 5, 6, 7])
    assert plan.num_rows == 4
    assert plan.compaction() == []


def test_clear_forgets_everybody() -> None:
    plan = scheduler(4)
    add(plan, 0, samples=6)
    plan.plan()
    plan.clear()
    assert plan.num_rows == 0
    assert not plan.has_running
    assert plan.plan() == []
