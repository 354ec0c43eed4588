"""Random weights depend on a parameter's name in the whole model, and on nothing of the parallel layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

SHAPES = ["grouped, gated, untied", "tied", "all biases", "experts", "odd widths", "windows"]
"""Of the last the vocabulary is padded further on two tensor-parallel ranks than on one."""
LAYOUTS = {
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "stages": (2, {"pipeline_model_parallel_size": 2}),
    "experts": (2, {"expert_model_parallel_size": 2}),
    "cut experts": (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "both": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def run(world_size: int, parallel: dict[str, int], shapes: list[str] = SHAPES) -> list[dict[str, Any]]:
    return run_ranks("tests.distributed.name_programs:models", world_size, parallel=parallel, shapes=shapes)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run(1, {})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_the_same_in_every_layout(one: dict[str, Any], layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    shapes = ["experts"] if "expert_model_parallel_size" in parallel else SHAPES
    ranks = run(world_size, parallel, shapes)
    for shape in shapes:
        models = [rank[shape] for rank in ranks]
        assert {model["fingerprint"] for model in models} == {one[shape]["fingerprint"]}
        for model in models:
            assert model["norm"] == pytest.approx(one[shape]["norm"], rel=1e-12)
            if shape != "odd widths":  # whose vocabulary has more padding
                assert model["active"] == one[shape]["active"]
        wanted, found = one[shape]["parameters"], [model["parameters"] for model in models]
        assert set().union(*found) == set(wanted)
        if layout in ("stages", "experts"):  # each rank has its parameters whole
            assert all(values == wanted[name] for parameters in found for name, values in parameters.items())


def test_a_token_meets_the_experts_that_it_is_sent_to(one: dict[str, Any]) -> None:
    """Two of four."""
    for shape, met in (("tied", 1.0), ("experts", 0.5)):
        parameters = one[shape]["parameters"].items()
        wanted = sum(count * (met if ".experts." in name else 1) for name, (_, count) in parameters)
        assert one[shape]["active"] == wanted
    assert any(".experts." in name for name in one["experts"]["parameters"])


def test_no_two_parameters_have_the_same_numbers(one: dict[str, Any]) -> None:
    """With one seed for all stages, layers of different stages were copies of each other."""
    parameters = one["grouped, gated, untied"]["parameters"]
    weights = {name: tuple(sums) for name, sums in parameters.items() if "norm" not in name and "bias" not in name}
    assert len(set(weights.values())) == len(weights)
