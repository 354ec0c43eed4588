"""Admission, refill and compaction: which sequence has which row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.inference.block_manager import RowBlocks
from megatron_rl.inference.paged_blocks import BlockPool, PagedBlocks
from megatron_rl.inference.scheduler import Chunk, Scheduler
from megatron_rl.inference.sequence import SequenceGroup, SequenceStatus
from megatron_rl.types import Hints, Place
from tests.support.generation import request


def scheduler(rows: int, budget: int = 1000) -> Scheduler:
    return Scheduler(rows, budget, RowBlocks())


def add(
    plan: Scheduler,
    number: int,
    prompt_length: int = 1,
    samples: int = 1,
    new: int = 100,
    expected: int | None = None,
    turn: int = 0,
    preempted: bool = False,
) -> SequenceGroup:
    """Prompts of different requests have no token in common."""
    prompt = tuple(1000 * number + i for i in range(prompt_length))
    asked = replace(request(prompt, samples, max_new_tokens=new), hints=Hints(expected), place=Place(turn=turn))
    group = SequenceGroup(number, asked, [0] * samples)
    for sequence in group.sequences:
        sequence.preempted = preempted
        plan.add(sequence)
    return group


def admitted(chunks: list[Chunk]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [(number(chunk), tuple(s.sample for s in chunk.sequences), chunk.rows) for chunk in chunks]


def number(chunk: Chunk) -> int:
    return chunk.sequences[0].group.number


def occupants(plan: Scheduler) -> dict[int, tuple[int, int]]:
    return {sequence.row: (sequence.group.number, sequence.sample) for sequence in plan.running}


def release(plan: Scheduler, rows: list[int]) -> None:
    for sequence in [sequence for sequence in plan.running if sequence.row in rows]:
        sequence.finish("stop")
        plan.free(sequence)


# -- what is next -------------------------------------------------------------------------------


def test_equals_are_served_as_they_come_in_the_lowest_rows() -> None:
    plan = scheduler(8)
    add(plan, 0, 5, samples=2)
    add(plan, 1, 5, samples=3)
    assert admitted(plan.plan()) == [(0, (0, 1), (0, 1)), (1, (0, 1, 2), (2, 3, 4))]
    assert plan.num_rows == 5
    assert occupants(plan) == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (1, 2)}


def test_the_longest_begin_first() -> None:
    plan = scheduler(8)
    for place, (new, expected) in enumerate([(10, 10), (90, 20), (50, 50), (90, 20)]):
        add(plan, place, new=new, expected=expected)
    assert [number(chunk) for chunk in plan.plan()] == [2, 1, 3, 0]


def test_preempted_sequences_and_conversations_before_the_rest() -> None:
    plan = scheduler(8)
    add(plan, 0, new=100)
    add(plan, 1, new=5, turn=1)
    add(plan, 2, new=3, preempted=True)
    add(plan, 3, new=7, turn=1)
    assert [number(chunk) for chunk in plan.plan()] == [2, 3, 1, 0]


def test_a_group_larger_than_the_rows_is_admitted_in_parts() -> None:
    plan = scheduler(4)
    group = add(plan, 7, 5, samples=10)
    seen = []
    while group.open_sequences:
        (chunk,) = plan.plan()
        seen += [sequence.sample for sequence in chunk.sequences]
        release(plan, list(chunk.rows))
    assert seen == list(range(10))


def test_freed_rows_are_refilled_before_new_ones() -> None:
    plan = scheduler(8)
    add(plan, 0, samples=6)
    plan.plan()
    release(plan, [1, 4])
    add(plan, 1, samples=3)
    assert admitted(plan.plan()) == [(1, (0, 1, 2), (1, 4, 6))]


@pytest.mark.parametrize(("released", "admitted"), [(1, 0), (2, 2)])
def test_a_running_batch_waits_for_an_eighth_of_the_rows(released: int, admitted: int) -> None:
    plan = scheduler(16)
    add(plan, 0, samples=20)
    plan.plan()
    release(plan, list(range(released)))
    assert sum(len(chunk.sequences) for chunk in plan.plan()) == admitted


def test_an_empty_batch_never_waits() -> None:
    plan = scheduler(16)
    add(plan, 0)
    assert admitted(plan.plan()) == [(0, (0,), (0,))]


def test_with_few_rows_one_free_row_is_enough() -> None:
    plan = scheduler(3)
    add(plan, 0, samples=4)
    plan.plan()
    release(plan, [2])
    assert admitted(plan.plan()) == [(0, (3,), (2,))]


# -- chunks of prompts -------------------------------------------------------------------------


def test_the_prefill_budget_counts_a_prompt_once_per_group() -> None:
    plan = scheduler(16, budget=10)
    for place in range(3):
        add(plan, place, 5, samples=4)
    assert [number(chunk) for chunk in plan.plan()] == [0, 1]
    assert [number(chunk) for chunk in plan.plan()] == [2]


def test_a_prompt_that_fits_the_budget_is_never_cut() -> None:
    """It waits for a step of its own: packed whole, it is computed as the trainer computes it."""
    plan = scheduler(16, budget=10)
    add(plan, 0, 7)
    add(plan, 1, 9)
    assert [(number(p), p.start, p.end) for p in plan.plan()] == [(0, 0, 7)]
    assert [(number(p), p.start, p.end) for p in plan.plan()] == [(1, 0, 9)]


def test_a_longer_prompt_is_cut_into_chunks_of_one_size() -> None:
    plan = scheduler(16, budget=10)
    add(plan, 0, 1, samples=2)
    add(plan, 1, 23, samples=3)
    add(plan, 2, 2)
    assert [(number(p), p.start, p.end) for p in plan.plan()] == [(0, 0, 1)]
    chunks = [plan.plan() for _ in range(3)]
    # What the chunks leave of the budget goes to the next prompts.
    assert [[(number(p), p.start, p.end) for p in step] for step in chunks] == [
        [(1, 0, 8), (2, 0, 2)],
        [(1, 8, 16)],
        [(1, 16, 23)],
    ]
    assert [step[0].is_last for step in chunks] == [False, False, True]
    assert all(step[0].rows == (2, 3, 4) for step in chunks)
    assert plan.plan() == []


def test_a_prompt_under_way_is_not_decoded() -> None:
    plan = scheduler(8, budget=10)
    add(plan, 0, 15, samples=2)
    plan.plan()
    assert plan.num_rows == 0
    assert not plan.running
    plan.plan()
    assert plan.num_rows == 2
    assert [(sequence.position, sequence.remaining) for sequence in plan.running] == [(15, 99), (15, 99)]


# -- rows --------------------------------------------------------------------------------------


def test_compaction_moves_the_highest_rows_into_the_holes() -> None:
    plan = scheduler(8)
    add(plan, 0, samples=8)
    plan.plan()
    release(plan, [0, 2, 3])
    assert plan.compact()[0] == [(5, 0), (6, 2), (7, 3)]
    assert plan.num_rows == 5
    assert occupants(plan) == {0: (0, 5), 1: (0, 1), 2: (0, 6), 3: (0, 7), 4: (0, 4)}
    assert plan.compact()[0] == []


def test_no_compaction_while_a_sequence_waits() -> None:
    plan = scheduler(32)
    add(plan, 0, samples=33)
    plan.plan()
    release(plan, [0, 1, 2, 3])
    assert plan.compact()[0] == []  # sample 32 waits for a row
    plan.plan()
    assert plan.compact()[0] == [(29, 1), (30, 2), (31, 3)]


def test_no_compaction_where_little_is_won() -> None:
    plan = scheduler(128)
    add(plan, 0, samples=128)
    plan.plan()
    release(plan, [0, 1, 2])
    assert plan.compact()[0] == []  # three idle rows of 128 are less than one in 32
    release(plan, [20])
    assert plan.compact()[0] == [(124, 0), (125, 1), (126, 2), (127, 20)]


def test_free_rows_at_the_end_are_no_holes() -> None:
    plan = scheduler(8)
    add(plan, 0, samples=8)
    plan.plan()
    release(plan, [4, 5, 6, 7])
    assert plan.num_rows == 4
    assert plan.compact()[0] == []


def test_the_load_is_what_has_rows_and_what_waits() -> None:
    plan = scheduler(rows=3)
    add(plan, 1, samples=2)
    add(plan, 2, samples=2)
    assert plan.load == (0, 4, 0, 0)
    plan.plan()
    assert plan.load == (3, 1, 0, 0), "rows have no blocks"
    release(plan, [0])
    assert plan.load == (2, 1, 0, 0)
    pool = BlockPool(10, block_size=4)
    paged = Scheduler(2, 1000, PagedBlocks(2, 5, pool))
    add(paged, 1, prompt_length=6, new=3)
    paged.plan()
    assert paged.load == (1, 0, pool.held, 10)
    assert pool.held >= 2, "six tokens take two blocks of four"


def test_clear_forgets_all() -> None:
    plan = scheduler(4)
    add(plan, 0, samples=6)
    plan.plan()
    plan.clear()
    assert plan.num_rows == 0
    assert not plan.running
    assert plan.plan() == []


def test_the_status_says_where_a_sequence_is() -> None:
    """From the queue by way of a prompt in two chunks to its end; the second sample waits for the only row."""
    plan = scheduler(1, budget=10)
    first, second = add(plan, 0, 15, samples=2).sequences
    assert [first.status, second.status] == [SequenceStatus.WAITING] * 2
    plan.plan()
    assert (first.status, second.status) == (SequenceStatus.PREFILL, SequenceStatus.WAITING)
    plan.plan()
    assert (first.status, first.row, first.num_generated) == (SequenceStatus.RUNNING, 0, 1)
    release(plan, [0])
    plan.plan()
    assert (first.status, second.status) == (SequenceStatus.FINISHED, SequenceStatus.PREFILL)
