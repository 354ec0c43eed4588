"""Layers of Transformer Engine on two tensor-parallel ranks, with a fake one in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.platform.groups import ParallelGroups
from tests.parity.engine_tensor_parallel_case import DENSE, EXPERTS, on_one_rank, resumed
from tests.parity.test_transformer_engine import FAKE
from tests.support.ranks import run_ranks

CASE = "tests.parity.engine_tensor_parallel_case"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def alone(one_rank: ParallelGroups, folder: Path) -> dict[str, Any]:
    """Rollouts of local layers on one rank, which leaves its other numbers in the folder."""
    shapes = {"dense": DENSE, "experts": EXPERTS}
    return {name: on_one_rank(one_rank, shape, folder / f"{name}.pt") for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def reports(alone: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return run_ranks(f"{CASE}:on_ranks", 2, imported_under=FAKE, folder=str(folder))


@pytest.fixture(scope="module")
def expert_reports(alone: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return run_ranks(f"{CASE}:on_expert_ranks", 2, imported_under=FAKE, folder=str(folder))


def is_one_ranks(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["logprobs"] < 1e-5
    for number in (1, 2):
        for what, most in (("gradients", 2e-5), ("norm", 1e-5), ("weights", 2e-6)):
            difference, name = found[f"{what} {number}"]
            assert difference < most, f"{what} of {name} after {number} updates"
    assert found["rollout"]["tokens"] == alone["tokens"]
    assert found["rollout"]["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-5)
    assert found["rollout"]["gap"] < 1e-5
    assert found["read by local layers"] == 0


@pytest.mark.parametrize("layers", ["local", "tensor", "sequence", "experts"])
def test_two_ranks_train_and_generate_as_one_does(
    reports: list[dict[str, Any]], alone: dict[str, Any], layers: str
) -> None:
    """Log-probs, gradients of all that is trained, two updates, and greedy rollouts; with and without shares."""
    for report in reports:
        is_one_ranks(report[layers], alone["experts" if layers == "experts" else "dense"])


def test_one_rank_goes_on_where_two_stopped(
    reports: list[dict[str, Any]], one_rank: ParallelGroups, folder: Path
) -> None:
    for layers in ("tensor", "sequence"):
        difference, name = resumed(one_rank, folder / layers, folder / "dense.pt")
        assert difference < 2e-6, name


def test_fp8_training_on_shares_is_that_on_whole_batches(reports: list[dict[str, Any]]) -> None:
    """The gradients of bf16 weights, which are added up in another order."""
    for report in reports:
        assert report["fp8 apart"]["logprobs"][0] == 0
        for what, most in (("gradients", 0.02), ("norm", 1e-3), ("weights", 0.01)):
            difference, name = report["fp8 apart"][what]
            assert difference < most, f"{what} of {name}"


def fp8_only_rounds(found: dict[str, Any]) -> None:
    assert max(found["gaps"]) < 1e-4 < 1e-2 < found["rounded"] < 0.15
    assert found["norm"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("layout", ["tensor", "sequence"])
def test_fp8_rollouts_and_gradients(reports: list[dict[str, Any]], layout: str) -> None:
    """Rollouts are the trainer's before and after an update."""
    for report in reports:
        fp8_only_rounds(report["fp8"][layout])


def are_local_layers(found: dict[str, Any], linears: int) -> None:
    ours, ours_updated, theirs, theirs_updated = found["tokens"]
    assert ours == theirs != ours_updated == theirs_updated
    assert max(found["gaps"]) < 1e-5 and max(found["gradients"]) < 2e-5
    local, engine = found["audits"]
    assert sorted(local) == sorted(engine) and len(engine) == linears
    assert all(agrees for _, _, agrees in engine)


@pytest.mark.parametrize("recipe", ["int8", "fp8_block_pow2"])
def test_8_bit_rollouts_are_those_of_local_layers(reports: list[dict[str, Any]], recipe: str) -> None:
    """Before and after an update, which the copies hear of; so is training on the copies."""
    for report in reports:
        are_local_layers(report["quantised"][recipe], 8)


def test_ranks_that_share_experts_too(expert_reports: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for report in expert_reports:
        is_one_ranks(report["experts"], alone["experts"])
        fp8_only_rounds(report["fp8"])
        are_local_layers(report["quantised"], 6 + 4 * 2 + 2)
