"""Admission, refill and compaction: who sits where."""

from __future__ import annotations

import random

import pytest

from megatron_rl.inference.scheduler import Admission, Scheduler


def scheduler(num_slots: int, budget: int = 1000) -> Scheduler:
    return Scheduler(num_slots, budget)


def test_first_come_first_served_in_the_lowest_slots() -> None:
    plan = scheduler(8)
    plan.add(0, prompt_length=5, num_samples=2)
    plan.add(1, prompt_length=5, num_samples=3)
    assert plan.admit() == [Admission(0, (0, 1), (0, 1)), Admission(1, (0, 1, 2), (2, 3, 4))]
    assert plan.num_rows == plan.num_running == 5
    assert not plan.has_waiting
    assert plan.occupant(3) == (1, 1)
    assert plan.occupied() == [0, 1, 2, 3, 4]


def test_a_group_larger_than_the_slots_enters_in_parts() -> None:
    plan = scheduler(4)
    plan.add(7, prompt_length=5, num_samples=10)
    seen = []
    while plan.has_waiting:
        (admission,) = plan.admit()
        seen += admission.samples
        plan.release(admission.slots)
    assert seen == list(range(10))


def test_freed_slots_are_refilled_before_new_rows_open() -> None:
    plan = scheduler(8)
    plan.add(0, prompt_length=1, num_samples=6)
    plan.admit()
    plan.release([1, 4])
    plan.add(1, prompt_length=1, num_samples=3)
    assert plan.admit() == [Admission(1, (0, 1, 2), (1, 4, 6))]


@pytest.mark.parametrize(("released", "admitted"), [(1, 0), (2, 2)])
def test_a_running_batch_waits_for_an_eighth_of_the_slots(released: int, admitted: int) -> None:
    plan = scheduler(16)
    plan.add(0, prompt_length=1, num_samples=20)
    plan.admit()
    plan.release(range(released))
    assert sum(len(a.samples) for a in plan.admit()) == admitted


def test_an_empty_batch_never_waits() -> None:
    plan = scheduler(16)
    plan.add(0, prompt_length=1, num_samples=1)
    assert plan.admit() == [Admission(0, (0,), (0,))]


def test_with_few_slots_one_free_slot_is_enough() -> None:
    plan = scheduler(3)
    plan.add(0, prompt_length=1, num_samples=4)
    plan.admit()
    plan.release([2])
    assert plan.admit() == [Admission(0, (3,), (2,))]


def test_the_prefill_budget_counts_a_prompt_once_per_group() -> None:
    plan = scheduler(16, budget=10)
    for request in range(3):
        plan.add(request, prompt_length=5, num_samples=4)
    assert [a.request for a in plan.admit()] == [0, 1]
    assert [a.request for a in plan.admit()] == [2]


def test_a_prompt_beyond_the_budget_enters_alone() -> None:
    plan = scheduler(16, budget=10)
    plan.add(0, prompt_length=50, num_samples=1)
    plan.add(1, prompt_length=1, num_samples=1)
    assert [a.request for a in plan.admit()] == [0]
    assert [a.request for a in plan.admit()] == [1]


def test_compaction_moves_the_highest_rows_into_the_holes() -> None:
    plan = scheduler(8)
    plan.add(0, prompt_length=1, num_samples=8)
    plan.admit()
    plan.release([0, 2, 3])
    assert plan.compaction() == [(5, 0), (6, 2), (7, 3)]
    assert plan.num_rows == plan.num_running == 5
    assert [plan.occupant(slot) for slot in range(5)] == [(0, 5), (0, 1), (0, 6), (0, 7), (0, 4)]
    assert plan.compaction() == []


def test_no_compaction_while_somebody_waits() -> None:
    plan = scheduler(32)
    plan.add(0, prompt_length=1, num_samples=33)
    plan.admit()
    plan.release([0, 1, 2, 3])
    assert plan.compaction() == []  # sample 32 waits for a slot
    plan.admit()
    assert plan.compaction() == [(29, 1), (30, 2), (31, 3)]


def test_no_compaction_where_little_is_won() -> None:
    plan = scheduler(128)
    plan.add(0, prompt_length=1, num_samples=128)
    plan.admit()
    plan.release([0, 1, 2])
    assert plan.compaction() == []  # three idle rows of 128 are less than one in 32
    plan.release([20])
    assert plan.compaction() == [(124, 0), (125, 1), (126, 2), (127, 20)]


def test_free_slots_at_the_end_are_no_holes() -> None:
    plan = scheduler(8)
    plan.add(0, prompt_length=1, num_samples=8)
    plan.admit()
    plan.release([4, 5, 6, 7])
    assert plan.num_rows == 4
    assert plan.compaction() == []


def test_clear_forgets_everybody() -> None:
    plan = scheduler(4)
    plan.add(0, prompt_length=1, num_samples=6)
    plan.admit()
    plan.clear()
    assert plan.num_rows == plan.num_running == 0
    assert plan.admit() == []


@pytest.mark.parametrize("seed", range(30))
def test_everybody_is_served_once_and_no_slot_has_two_occupants(seed: int) -> None:
    """Random requests, random endings; a plain dictionary keeps the books beside the scheduler."""
    draw = random.Random(seed)
    num_slots, budget = draw.randint(1, 40), draw.randint(1, 60)
    plan = scheduler(num_slots, budget)
    prompts = [draw.randint(1, 20) for _ in range(draw.randint(1, 12))]
    sizes = [draw.randint(1, 2 * num_slots) for _ in prompts]
    arrivals = list(range(len(prompts)))
    seats: dict[int, tuple[int, int]] = {}
    served: list[tuple[int, int]] = []
    for _ in range(10_000):
        if arrivals and draw.random() < 0.3:
            request = arrivals.pop(0)
            plan.add(request, prompts[request], sizes[request])
        admissions = plan.admit()
        assert len(admissions) <= 1 or sum(prompts[a.request] for a in admissions) <= budget
        for admission in admissions:
            for sample, slot in zip(admission.samples, admission.slots, strict=True):
                assert slot not in seats
                assert 0 <= slot < num_slots
                seats[slot] = (admission.request, sample)
                served.append((admission.request, sample))
        ended = [slot for slot in seats if draw.random() < 0.2]
        plan.release(ended)
        for slot in ended:
            del seats[slot]
        for source, destination in plan.compaction():
            assert destination not in seats
            assert destination < source
            seats[destination] = seats.pop(source)
        assert {slot: plan.occupant(slot) for slot in plan.occupied()} == seats
        assert plan.num_running == len(seats)
        assert plan.num_rows == max(seats, default=-1) + 1
        if not arrivals and not seats and not plan.has_waiting:
            break
    everybody = [(request, sample) for request, size in enumerate(sizes) for sample in range(size)]
    assert served == everybody, "not first come first served, or somebody was lost or served twice"
