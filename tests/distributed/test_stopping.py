"""A stop request that reaches one rank ends the rollout on all of them, and leaves no trace."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks


@pytest.mark.parametrize("sizes", [{}, {"tensor_size": 2}, {"stages": 2}], ids=["data", "tensor", "stages"])
def test_all_ranks_stop(sizes: dict[str, int]) -> None:
    """On stages the rollout is left with messages under way; the step after it must not take them for its own."""
    program = "tests.distributed.step_programs:stop_on_one_rank"
    reports = run_ranks(program, 2, timeout=600, stopped_rank=1, **sizes)
    undisturbed = run_ranks(program, 2, timeout=600, stopped_rank=-1, **sizes)
    assert [report["result"] for report in reports] == [True, True]
    assert all(report["under way"] == ("stages" in sizes) for report in reports)
    assert [report["cursor"] for report in reports] == [True, True]
    assert [report["result"] for report in undisturbed] == [False, False]
    assert reports[0]["loss"] == reports[1]["loss"] != undisturbed[0]["loss"]  # a first step, a second one


def test_copies_that_share_experts_take_the_same_steps() -> None:
    """Megatron's groups of one size have none such yet: the group is put in, and a rank without work steps along."""
    reports = run_ranks("tests.distributed.step_programs:one_copy_generates", 2, timeout=600)
    assert reports == [{"steps": 3, "groups": 1}, {"steps": 3, "groups": 0}]


def test_grades_are_told_seldom_where_nobody_replies() -> None:
    """Each time the ranks of a copy wait for each other. Steps 8 and 16, and some when all is generated."""
    program = "tests.distributed.step_programs:slow_grades"
    seldom, at_once = (run_ranks(program, 2, timeout=600, max_turns=turns)[0] for turns in (1, 2))
    assert seldom <= 8 < 17 <= at_once
