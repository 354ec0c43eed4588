"""Quantised rollouts and aligned training on two tensor-parallel ranks.

Each quantises its own part by itself. The reference is one rank that does so with both halves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.platform.groups import ParallelGroups
from tests.parity.quantized_tensor_parallel_case import RECIPES, report_of
from tests.support.ranks import run_ranks

Reports = list[dict[str, dict[str, Any]]]


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.long), True], ids=["", "sequence_parallel"]
)
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, Path]:
    """The reports of both ranks, and where the gradients lie."""
    folder = tmp_path_factory.mktemp("gradients")
    reports = run_ranks(
        "tests.parity.quantized_tensor_parallel_case:on_ranks",
        2,
        tensor_size=2,
        sequence_parallel=request.param,
        folder=str(folder),
    )
    return reports, folder


@pytest.fixture(scope="module")
def alone(one_rank: ParallelGroups, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The same of one rank, with both halves of each weight."""
    folder = tmp_path_factory.mktemp("gradients_of_one")
    return {recipe: report_of(one_rank, recipe, {}, folder, in_parts=True) for recipe in RECIPES}, folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_generate_what_one_does(
    two_ranks: tuple[Reports, Path], alone: tuple[dict[str, Any], Path], recipe: str
) -> None:
    first, second = (report[recipe] for report in two_ranks[0])
    assert first == second, "the ranks disagree"
    single = alone[0][recipe]
    for kind in ("greedy", "sampled"):
        assert first[kind]["tokens"] == single[kind]["tokens"], kind
        assert first[kind]["logprobs"] == pytest.approx(single[kind]["logprobs"], abs=1e-5), kind
    assert first["audit"] == single["audit"]
    assert first["gap"] < 1e-5, "the trainer's quantised forward pass is another"
    assert single["gap"] < 1e-5
    assert single["refused"].startswith("the weight of layers.0.")
    assert first["refused"] == single["refused"], "a NaN of the second rank got through"


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_are_as_close_to_full_precision_as_one(
    two_ranks: tuple[Reports, Path], one_rank: ParallelGroups, tmp_path: Path, recipe: str
) -> None:
    cost, single = two_ranks[0][0][recipe]["cost"], report_of(one_rank, recipe, {}, tmp_path)
    assert 0.6 * single["cost"] < cost < 1.4 * single["cost"]
    if recipe == "fp8_block":  # a rank's part has whole tiles: the codes are the same
        assert two_ranks[0][0][recipe]["sampled"]["tokens"] == single["sampled"]["tokens"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sum_over_ranks_is_that_of_their_products(
    two_ranks: tuple[Reports, Path], alone: tuple[dict[str, Any], Path], recipe: str
) -> None:
    products, single = two_ranks[0][0][recipe]["products"], alone[0][recipe]["products"]
    assert len(products) == 4
    for name, product in products.items():
        if recipe == "int8_smooth":  # calibrated in full precision, whose sums have another last bit
            assert product == pytest.approx(single[name], rel=1e-4, abs=1e-4), name
        else:
            assert product == single[name], f"{name}: not the same bits"


@pytest.mark.parametrize("recipe", RECIPES)
def test_aligned_training_has_the_gradients_of_one(
    two_ranks: tuple[Reports, Path], alone: tuple[dict[str, Any], Path], recipe: str
) -> None:
    ours, single = (torch.load(folder / f"{recipe}.pt") for folder in (two_ranks[1], alone[1]))
    assert ours.keys() == single.keys() | {name for name in ours if name.startswith("backward.")}
    for name, gradient in single.items():
        assert gradient.abs().max() > 0, name
        distance = (ours[name] - gradient).norm() / gradient.norm()
        assert distance < 1e-5, f"{name}: {distance:.1e}"


def test_a_quantised_backward_pass_has_the_tiles_of_one(
    two_ranks: tuple[Reports, Path], one_rank: ParallelGroups, tmp_path: Path
) -> None:
    """Tiles and segments lie within a rank; what differs is the order of sums, and now and then a code for it."""
    ours = torch.load(two_ranks[1] / "fp8_block.pt")
    report_of(one_rank, "fp8_block", {}, tmp_path)
    single = torch.load(tmp_path / "fp8_block.pt")
    linears = [name for name in single if name.startswith("backward.") and ".linear_" in name]
    assert len(linears) > 8
    for name in linears:
        distance = (ours[name] - single[name]).norm() / single[name].norm()
        assert distance < 5e-3, f"{name}: {distance:.1e}"
        assert not torch.equal(single[name], single[name.removeprefix("backward.")])
