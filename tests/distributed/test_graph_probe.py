"""CUDA graphs that nobody asked for, on several ranks: tried once, captured by all at one step, or used by none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

TENSOR, STAGES = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERTS = {"parallel": {"expert_model_parallel_size": 2}, "num_experts": 4, "add_qkv_bias": False}
LINE = "decode runs eager: CUDA graphs cannot hold the exchanges of ranks here"
FAULTS: list[tuple[dict[int, str], str]] = [
    ({0: "capture"}, "operation not permitted when stream is capturing"),
    ({1: "capture"}, "it failed on another rank"),
    ({0: "replay"}, "a replayed all-reduce gave another sum"),
    ({1: "replay"}, "a replayed all-reduce gave another sum"),
]


@pytest.mark.parametrize("given", [{"parallel": TENSOR}, EXPERTS, {"parallel": STAGES}], ids=["TP2", "EP2", "PP2"])
def test_all_ranks_capture_at_one_step(given: dict[str, Any]) -> None:
    ranks = run_ranks("tests.distributed.graph_programs:generate", 2, **given)
    for rank in ranks:
        assert rank["graphs"] == rank["eager"] != {}
        assert rank["probes"] == (0 if given["parallel"] == STAGES else 1), "stages exchange nothing within a graph"
        assert rank["captured at"] > 2, "after 10 decode steps, of which an engine step has up to 4"
    assert ranks[0]["captured at"] == ranks[1]["captured at"]


def test_a_fault_on_one_rank_leaves_all_eager() -> None:
    """One rank says so, in one line."""
    program = "tests.distributed.graph_programs:probe"
    ranks = run_ranks(program, 2, parallel=TENSOR, faults=[{}, *(ranks for ranks, _ in FAULTS)])
    for (is_graphed, said), *rows in ranks:
        assert is_graphed and said == []
        assert [is_graphed for is_graphed, _ in rows] == [False] * len(FAULTS)
    assert [said for _, said in ranks[0][1:]] == [[f"{LINE} ({line})"] for _, line in FAULTS]
    assert [said for _, said in ranks[1][1:]] == [[]] * len(FAULTS)
