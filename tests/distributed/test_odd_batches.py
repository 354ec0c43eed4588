"""Steps in which a rank, or the whole job, has nothing to train on, or something it must not train on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

BASE = {"grpo_iterations": 2, "train_iters": 16, "weight_decay": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "distributed": BASE | {"use_distributed_optimizer": True},
    "overlap_grad": BASE | {"overlap_grad_reduce": True},
    "overlap_both": BASE
    | {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
}
WEIGHT_TOLERANCE = 1e-5


class Outcome:
    """The reports of both ranks and of one rank alone, with the weights after each stage."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.one = self._run("one", 1)[0]
        self.first, self.second = self._run("two", 2)

    def weights(self, topology: str, variant: str, stage: str) -> torch.Tensor:
        """All weights after ``stage`` in one vector."""
        weights = torch.load(self._folder / topology / f"{variant}.{stage}.pt", weights_only=True)
        return torch.cat([value.flatten() for value in weights.values()])

    def _run(self, topology: str, world_size: int) -> list[Any]:
        folder = self._folder / topology
        folder.mkdir()
        program = "tests.distributed.step_programs:odd_batches"
        return run_ranks(program, world_size, timeout=600, folder=str(folder), variants=VARIANTS)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rank_without_samples_takes_part(outcome: Outcome, variant: str) -> None:
    """One sample, two ranks: the result is that of one rank with that sample."""
    first, second = outcome.first[variant]["few"], outcome.second[variant]["few"]
    assert sorted(first["micro_batches"] + second["micro_batches"]) == [0, 1]
    assert first["metrics"] == second["metrics"]
    for name, value in outcome.one["plain"]["few"]["metrics"].items():
        assert first["metrics"][name] == pytest.approx(value, abs=1e-5), name
    expected = outcome.weights("one", "plain", "few")
    assert (outcome.weights("two", variant, "few") - expected).abs().max() < WEIGHT_TOLERANCE
    assert (outcome.weights("one", "plain", "usual") - expected).abs().max() > 100 * WEIGHT_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_without_samples_leaves_every_bit_of_the_weights(outcome: Outcome, variant: str) -> None:
    """Momentum and weight decay would move them."""
    assert outcome.first[variant]["none"] == {"micro_batches": [], "applied": 0, "skipped": 0, "metrics": {}}
    for topology in ("one", "two"):
        before, after = (outcome.weights(topology, variant, stage) for stage in ("few", "none"))
        assert torch.equal(before, after)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_of_rejected_tokens_alone_leaves_every_bit_of_the_weights(outcome: Outcome, variant: str) -> None:
    for report in (outcome.one, outcome.first, outcome.second):
        assert (report[variant]["rejected"]["applied"], report[variant]["rejected"]["skipped"]) == (0, 0)
        assert report[variant]["after"]["applied"] > 0
    for topology in ("one", "two"):
        before, after = (outcome.weights(topology, variant, stage) for stage in ("none", "rejected"))
        assert torch.equal(before, after)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_non_finite_gradient_is_skipped_by_all_ranks(outcome: Outcome, variant: str) -> None:
    """Only one rank has the sample that causes it."""
    reports = [outcome.first[variant]["poisoned"], outcome.second[variant]["poisoned"]]
    assert sorted(report["micro_batches"] for report in reports) == [[0], [1]]
    for report in reports:
        assert report["skipped"] == 2
        assert math.isnan(report["metrics"]["actor/grad_norm"])
    before, after = (outcome.weights("two", variant, stage) for stage in ("none", "poisoned"))
    assert torch.equal(before, after)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_on_after_all_that(outcome: Outcome, variant: str) -> None:
    """A skipped update leaves nothing behind in gradient buffers or optimizer state."""
    expected = outcome.weights("one", "plain", "after")
    assert (outcome.weights("two", variant, "after") - expected).abs().max() < WEIGHT_TOLERANCE
    assert outcome.first[variant]["after"]["skipped"] == 0
    assert not torch.equal(outcome.weights("two", variant, "poisoned"), expected)


def test_the_reference_pass_sees_the_weights_of_the_last_update(tmp_path: Path) -> None:
    """They are on their way then, which a rollout in between would have hidden."""
    base = {"grpo_kl_beta": 0.1, "use_distributed_optimizer": True}
    variants = {"plain": base, "overlap": base | {"overlap_grad_reduce": True, "overlap_param_gather": True}}
    program = "tests.distributed.step_programs:train_again"
    for report in run_ranks(program, 2, timeout=600, folder=str(tmp_path), variants=variants):
        for plain, overlap in zip(report["plain"], report["overlap"], strict=True):
            assert overlap == pytest.approx(plain, abs=1e-5)
        assert report["plain"][1]["actor/kl_loss"] > 1e-4
    plain, overlap = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in variants)
    assert max((plain[name] - overlap[name]).abs().max() for name in plain) < WEIGHT_TOLERANCE
