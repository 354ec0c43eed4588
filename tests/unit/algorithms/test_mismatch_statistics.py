"""Statistics of the gap between engine and trainer on numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms import CLIPPED, TokenBatch
from megatron_rl.algorithms.mismatch import mismatch_metrics, mismatch_sums
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.update import reduce_sums
from tests.support.tokens import changed, correction, step_rewards, token_batch

LN2 = math.log(2)
# Ratios old / engine 3, 0.6, 0.25, 1 and a masked token.
INFERENCE = torch.tensor([-1.0, -2.0, -0.5, -4.0, torch.nan])
OLD = INFERENCE + torch.tensor([3.0, 0.6, 0.25, 1.0, 1.0]).log()
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])


Sums = dict[str, Tensor]


def of(old: Tensor, inference: Tensor, mask: Tensor) -> TokenBatch:
    """One sequence."""
    return token_batch(torch.zeros(old.numel()), mask, old_logprobs=old, inference_logprobs=inference)


def sums_of(name: str, old: Tensor, inference: Tensor, mask: Tensor) -> Sums:
    batch = of(old, inference, mask)
    weights, sums = correction(name, cap=2.0)(batch)
    return mismatch_sums(batch, weights, sums.get(CLIPPED, torch.zeros_like(batch.in_loss)))


def metrics_of(name: str, old: Tensor, inference: Tensor, mask: Tensor) -> dict[str, float]:
    return mismatch_metrics(sums_of(name, old, inference, mask))


def two_tokens() -> Sums:
    """Ratios 3 and 0.5, weights 2 and 0.5."""
    return sums_of("token_tis", torch.tensor([3.0, 0.5]).log(), torch.zeros(2), torch.ones(2))


def test_statistics() -> None:
    metrics = mismatch_metrics(two_tokens())
    assert metrics.pop("rollout_corr/abs_log_ratio_p95") == pytest.approx(1.098612, rel=0.1)
    assert metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": 1.25,  # (2 + 0.5) / 2
            "rollout_corr/rollout_is_eff_sample_size": 0.735294,  # 2.5^2 / (2 * (4 + 0.25))
            "rollout_corr/rollout_is_clipped": 0.5,
            "rollout_corr/log_ratio_mean": 0.202733,  # (1.098612 - 0.693147) / 2
            "rollout_corr/log_ratio_std": 0.895880,  # half of the distance from -0.693147 to 1.098612
            "training/rollout_logprob_gap_mean": 0.895880,  # (1.098612 + 0.693147) / 2
            "training/rollout_logprob_gap_max": 1.098612,
            "rollout_corr/abs_log_ratio_mean": 0.895880,
            # KL(inference || old), r = old / inference, r - 1 - log r: 3 - 1 - 1.098612, 0.5 - 1 + 0.693147.
            "rollout_corr/k3_kl": (0.901388 + 0.193147) / 2,
            "rollout_corr/residual_gap": 0.0,  # of the token that was not capped
        },
        rel=1e-5,
        abs=1e-6,
    )


def test_engine_and_trainer_are_compared_on_what_the_same_weights_drew() -> None:
    """Ratios 3, 0.5 and 2; the step began with version 7, which drew the second token alone."""
    step = step_rewards(torch.zeros(1), torch.ones(1).bool(), torch.zeros(1).long())
    batch = changed(
        of(torch.tensor([3.0, 0.5, 2.0]).log(), torch.zeros(3), torch.ones(3)),
        versions=torch.tensor([5, 7, 6]), step=replace(step, policy_version=7),
    )  # fmt: skip
    assert batch.lag.tolist() == [2, 0, 1]
    weights, sums = correction("token_tis", cap=2.0)(batch)
    assert weights.tolist() == pytest.approx([2.0, 0.5, 2.0])
    metrics = mismatch_metrics(mismatch_sums(batch, weights, sums[CLIPPED]))
    assert metrics["training/rollout_logprob_gap_mean"] == pytest.approx(0.693147)
    assert metrics["training/rollout_logprob_gap_max"] == pytest.approx(0.693147)
    assert metrics["rollout_corr/abs_log_ratio_mean"] == pytest.approx((1.098612 + 0.693147 + 0.693147) / 3)
    assert metrics["rollout_corr/stale_abs_log_ratio_mean"] == pytest.approx((1.098612 + 0.693147) / 2)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.5)


def test_where_older_weights_drew_all_tokens_no_gap_of_0_is_claimed() -> None:
    step = step_rewards(torch.zeros(1), torch.ones(1).bool(), torch.zeros(1).long())
    batch = of(torch.tensor([3.0, 0.5]).log(), torch.zeros(2), torch.ones(2))
    for version, stale in ((6, (1.098612 + 0.693147) / 2), (7, None)):
        of_step = changed(batch, versions=torch.full((2,), version), step=replace(step, policy_version=7))
        metrics = mismatch_metrics(mismatch_sums(of_step, torch.ones(2), torch.zeros(2).bool()))
        assert ("training/rollout_logprob_gap_mean" in metrics) == (stale is None)
        assert metrics.get("rollout_corr/stale_abs_log_ratio_mean") == (stale and pytest.approx(stale))


def test_a_trainer_that_holds_tokens_for_less_likely_has_a_negative_mean() -> None:
    inference = torch.tensor([-1.0, -3.0])
    metrics = metrics_of("none", inference - torch.tensor([0.5, 0.1]), inference, torch.ones(2))
    assert metrics["rollout_corr/log_ratio_mean"] == pytest.approx(-0.3)
    assert metrics["rollout_corr/log_ratio_std"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("weights", "clipped", "residual"),
    [
        ([2.0, 0.5, 1.0], [False] * 3, 0.0),  # the ratios
        ([1.0, 1.0, 1.0], [False] * 3, 2 * LN2 / 3),  # no correction: the gap itself
        ([0.5, 2.0, 1.0], [False] * 3, 4 * LN2 / 3),  # inverted: twice the gap
        ([0.0, 2.0, 1.0], [False] * 3, LN2),  # a weight of 0 leaves no gap: (2 ln2 + 0) / 2
        ([0.5, 2.0, 1.0], [True, True, False], 0.0),  # nor does a clipped one
    ],
)
def test_residual_gap(weights: list[float], clipped: list[bool], residual: float) -> None:
    """Ratios 2, 0.5 and 1, and a masked token."""
    inference = torch.tensor([-1.0, -2.0, -0.5, torch.nan])
    old = inference + torch.tensor([LN2, -LN2, 0.0, 1.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    applied = torch.tensor([*weights, 0.0]), torch.tensor([*clipped, False])
    metrics = mismatch_metrics(mismatch_sums(of(old, inference, mask), *applied))
    assert metrics["rollout_corr/residual_gap"] == pytest.approx(residual, abs=1e-6)
    assert metrics["training/rollout_logprob_gap_mean"] == pytest.approx(2 * LN2 / 3)


def test_a_deliberately_inverted_correction_doubles_the_gap() -> None:
    """Noise of 0.05 nats a token, as of a quantised rollout."""
    generator = torch.Generator().manual_seed(0)
    inference = -3 * torch.rand(2000, generator=generator)
    old, mask = inference + 0.05 * torch.randn(2000, generator=generator), torch.ones(2000)
    batch = of(old, inference, mask)
    weights, sums = correction("token_tis")(batch)
    metrics = mismatch_metrics(mismatch_sums(batch, 1 / weights, sums[CLIPPED]))
    gap = metrics["training/rollout_logprob_gap_mean"]
    assert gap == pytest.approx(0.05 * 0.8, rel=0.05)  # E|x| of a normal is 0.798 sigma
    assert metrics["rollout_corr/residual_gap"] == pytest.approx(2 * gap, rel=1e-4)
    assert metrics_of("token_tis", old, inference, mask)["rollout_corr/residual_gap"] < 1e-6
    unchanged = metrics_of("none", old, inference, mask)
    assert unchanged["rollout_corr/residual_gap"] == unchanged["training/rollout_logprob_gap_mean"]


@pytest.mark.parametrize("size", [3e-8, 1e-6, 0.0225, 0.7, 19.9])
def test_the_95th_percentile_is_within_a_tenth(size: float) -> None:
    """Of 1, 2, ... 100 parts of the size, the 95th; and of a hundred times the same."""
    parts = size * torch.arange(1, 101) / 100
    for old, expected in ((parts, 0.95 * size), (-parts.flip(0), 0.95 * size), (torch.full((100,), size), size)):
        metrics = metrics_of("none", old, torch.zeros(100), torch.ones(100))
        assert metrics["rollout_corr/abs_log_ratio_p95"] == pytest.approx(expected, rel=0.1)


def test_the_95th_percentile_of_mostly_equal_logprobs_is_zero() -> None:
    old = torch.zeros(100)
    old[:4] = 3.0
    metrics = metrics_of("none", old, torch.zeros(100), torch.ones(100))
    assert metrics["rollout_corr/abs_log_ratio_p95"] == 0
    assert metrics["training/rollout_logprob_gap_max"] == 3


def test_statistics_of_parts_add_up_to_those_of_the_whole(one_rank: ParallelGroups) -> None:
    whole = metrics_of("masked_is", OLD, INFERENCE, MASK)
    parts = [sums_of("masked_is", OLD[part], INFERENCE[part], MASK[part]) for part in (slice(0, 2), slice(2, 5))]
    together = mismatch_metrics(reduce_sums(parts, one_rank.data_group, torch.device("cpu")))
    assert together == pytest.approx(whole)
    assert all(math.isfinite(value) for value in whole.values())
    # The 96 bins and more that 10 % need, counted once each.
    assert parts[0]["mismatch/histogram"].numel() > 96
    assert parts[0]["mismatch/histogram"].sum() == 2


def test_statistics_of_nothing_are_zero(one_rank: ParallelGroups) -> None:
    empty = torch.zeros(0)
    nothing = sums_of("none", empty, empty, empty)
    assert set(mismatch_metrics(nothing).values()) == {0.0}
    with_nothing = reduce_sums([nothing, two_tokens()], one_rank.data_group, torch.device("cpu"))
    assert mismatch_metrics(with_nothing) == mismatch_metrics(two_tokens())
    assert reduce_sums([], one_rank.data_group, torch.device("cpu")) == {}


def test_a_logprob_that_is_not_finite_breaks_nothing() -> None:
    """The trainer masks such tokens before; whoever does not gets NaN and no index out of bounds."""
    metrics = metrics_of("none", torch.tensor([torch.nan, 0.0]), torch.zeros(2), torch.ones(2))
    assert math.isnan(metrics["training/rollout_logprob_gap_mean"])
