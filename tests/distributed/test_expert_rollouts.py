"""Rollouts with experts over ranks complete what one rank completes, however unequal the ranks' work is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

SHARED = {"expert_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP2": (2, SHARED),
    "TP2 x EP2, ETP1": (2, SHARED | TENSOR | {"expert_tensor_parallel_size": 1}),
    "TP2 x EP2, ETP2": (4, SHARED | TENSOR),
    "EP4": (4, {"expert_model_parallel_size": 4}),
    "TP2 x EP4, ETP1": (4, TENSOR | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
}
LONG = ("EP4", "TP2 x EP4, ETP1")
DEALS = {"uneven": [0, 0, 0, 0, 1], "one has all": [0, 0, 0, 0, 0]}
"""The replica of each group."""


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_ranks("tests.distributed.expert_programs:complete", 1, parallel={}, deals={"all": [0] * 5})[0]["all"]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in LAYOUTS]
)
def test_as_on_one_rank(one: dict[str, Any], layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    replicas = world_size // parallel.get("tensor_model_parallel_size", 1)
    deals = DEALS if replicas > 1 else {"all": [0] * 5}
    ranks = run_ranks("tests.distributed.expert_programs:complete", world_size, parallel=parallel, deals=deals)
    for deal in deals:
        answers = {group: found for rank in ranks for group, found in rank[deal]["answers"].items()}
        assert answers.keys() == one["answers"].keys()
        for group, found in answers.items():
            pairs = zip(found, one["answers"][group], strict=True)
            for (tokens, logprobs, experts), (wanted, expected, chosen) in pairs:
                assert (tokens, experts) == (wanted, chosen)
                assert logprobs == pytest.approx(expected, abs=1e-5)
    if replicas > 1:
        assert ranks[-1]["one has all"]["decode steps"] == 0  # it took part all the same
