"""A stop request that reaches one rank ends the rollout on all of them, and leaves no trace."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks


@pytest.mark.parametrize("tensor_size", [1, 2], ids=["data", "tensor"])
def test_all_ranks_stop(tensor_size: int) -> None:
    program = "tests.distributed.step_programs:stop_on_one_rank"
    reports = run_ranks(program, 2, timeout=600, tensor_size=tensor_size, stopped_rank=1)
    undisturbed = run_ranks(program, 2, timeout=600, tensor_size=tensor_size, stopped_rank=-1)
    assert [report["result"] for report in reports] == [True, True]
    assert [report["cursor"] for report in reports] == [True, True]
    assert [report["result"] for report in undisturbed] == [False, False]
    assert reports[0]["loss"] == reports[1]["loss"] != undisturbed[0]["loss"]  # a first step, a second one
