"""Statistics of the gap between engine and trainer on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.corrections.composition import get_correction
from megatron_rl.algorithms.corrections.statistics import MismatchStatistics, mismatch_statistics
from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig

LN2 = math.log(2)
# Ratios old / engine 3, 0.6, 0.25, 1 and a masked token.
INFERENCE = torch.tensor([-1.0, -2.0, -0.5, -4.0, torch.nan])
OLD = INFERENCE + torch.tensor([3.0, 0.6, 0.25, 1.0, 1.0]).log()
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])


def statistics_of(name: str, old: Tensor, inference: Tensor, mask: Tensor) -> MismatchStatistics:
    sequence = torch.zeros(old.numel(), dtype=torch.int64)
    correction = get_correction(name)(old, inference, mask, sequence, 1, CorrectionConfig(cap=2.0))
    return mismatch_statistics(old, inference, mask, correction)


def two_token_statistics() -> MismatchStatistics:
    """Ratios 3 and 0.5, weights 2 and 0.5."""
    return statistics_of("token_tis", torch.tensor([3.0, 0.5]).log(), torch.zeros(2), torch.ones(2))


def test_statistics() -> None:
    metrics = two_token_statistics().metrics()
    assert metrics.pop("p95_abs_delta_logprob") == pytest.approx(1.098612, rel=0.1)
    assert metrics == pytest.approx(
        {
            "mean_weight": 1.25,  # (2 + 0.5) / 2
            "effective_sample_size": 0.735294,  # 2.5^2 / (2 * (4 + 0.25))
            "fraction_clipped": 0.5,
            "mean_delta_logprob": 0.202733,  # (1.098612 - 0.693147) / 2
            "std_delta_logprob": 0.895880,  # half of the distance from -0.693147 to 1.098612
            "mean_abs_delta_logprob": 0.895880,  # (1.098612 + 0.693147) / 2
            "max_abs_delta_logprob": 1.098612,
            # KL(inference || old), r = old / inference, r - 1 - log r: 3 - 1 - 1.098612, 0.5 - 1 + 0.693147.
            "k3_kl": (0.901388 + 0.193147) / 2,
            "residual_gap": 0.0,  # of the token that was not capped
        },
        rel=1e-5,
        abs=1e-6,
    )


def test_a_trainer_that_holds_tokens_for_less_likely_has_a_negative_mean() -> None:
    inference = torch.tensor([-1.0, -3.0])
    metrics = statistics_of("none", inference - torch.tensor([0.5, 0.1]), inference, torch.ones(2)).metrics()
    assert metrics["mean_delta_logprob"] == pytest.approx(-0.3)
    assert metrics["std_delta_logprob"] == pytest.approx(0.2)


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
    correction = Correction(weights=torch.tensor([*weights, 0.0]), clipped=torch.tensor([*clipped, False]))
    metrics = mismatch_statistics(old, inference, mask, correction).metrics()
    assert metrics["residual_gap"] == pytest.approx(residual, abs=1e-6)
    assert metrics["mean_abs_delta_logprob"] == pytest.approx(2 * LN2 / 3)


def test_a_deliberately_inverted_correction_doubles_the_gap() -> None:
    """Noise of 0.05 nats a token, as of a quantised rollout."""
    generator = torch.Generator().manual_seed(0)
    inference = -3 * torch.rand(2000, generator=generator)
    old, mask = inference + 0.05 * torch.randn(2000, generator=generator), torch.ones(2000)
    right = get_correction("token_tis")(old, inference, mask, mask.long(), 2, CorrectionConfig())
    inverted = Correction(weights=1 / right.weights, clipped=right.clipped)
    metrics = mismatch_statistics(old, inference, mask, inverted).metrics()
    gap = metrics["mean_abs_delta_logprob"]
    assert gap == pytest.approx(0.05 * 0.8, rel=0.05)  # E|x| of a normal is 0.798 sigma
    assert metrics["residual_gap"] == pytest.approx(2 * gap, rel=1e-4)
    assert mismatch_statistics(old, inference, mask, right).metrics()["residual_gap"] < 1e-6
    unchanged = statistics_of("none", old, inference, mask).metrics()
    assert unchanged["residual_gap"] == unchanged["mean_abs_delta_logprob"]


@pytest.mark.parametrize("size", [3e-8, 1e-6, 0.0225, 0.7, 19.9])
def test_the_95th_percentile_is_within_a_tenth(size: float) -> None:
    """Of 1, 2, ... 100 parts of the size, the 95th; and of a hundred times the same."""
    parts = size * torch.arange(1, 101) / 100
    for old, expected in ((parts, 0.95 * size), (-parts.flip(0), 0.95 * size), (torch.full((100,), size), size)):
        metrics = statistics_of("none", old, torch.zeros(100), torch.ones(100)).metrics()
        assert metrics["p95_abs_delta_logprob"] == pytest.approx(expected, rel=0.1)


def test_the_95th_percentile_of_mostly_equal_logprobs_is_zero() -> None:
    old = torch.zeros(100)
    old[:4] = 3.0
    metrics = statistics_of("none", old, torch.zeros(100), torch.ones(100)).metrics()
    assert metrics["p95_abs_delta_logprob"] == 0
    assert metrics["max_abs_delta_logprob"] == 3


def test_statistics_of_parts_merge_to_those_of_the_whole() -> None:
    whole = statistics_of("masked_is", OLD, INFERENCE, MASK)
    first, second = (
        statistics_of("masked_is", OLD[part], INFERENCE[part], MASK[part]) for part in (slice(0, 2), slice(2, 5))
    )
    assert first.merge(second).metrics() == pytest.approx(whole.metrics())
    started = MismatchStatistics.zeros(torch.device("cpu")).merge(second).merge(first)
    assert started.metrics() == pytest.approx(whole.metrics())
    assert all(math.isfinite(value) for value in whole.metrics().values())


def test_statistics_survive_the_trip_through_tensors() -> None:
    statistics = two_token_statistics()
    zeros = MismatchStatistics.zeros(torch.device("cpu"))
    assert statistics.sum_tensor().shape == zeros.sum_tensor().shape
    assert statistics.max_tensor().shape == (1,)
    again = MismatchStatistics.from_tensors(statistics.sum_tensor(), statistics.max_tensor())
    assert again.metrics() == statistics.metrics()
    # The 96 bins and more that 10 % need, counted once each.
    assert statistics.abs_delta_histogram.numel() > 96
    assert statistics.abs_delta_histogram.sum() == 2


def test_statistics_of_nothing_are_zero() -> None:
    empty = torch.zeros(0)
    statistics = statistics_of("none", empty, empty, empty)
    assert set(statistics.metrics().values()) == {0.0}
    assert set(MismatchStatistics.zeros(torch.device("cpu")).metrics().values()) == {0.0}
    merged = statistics.merge(two_token_statistics())
    assert merged.metrics() == two_token_statistics().metrics()


def test_a_logprob_that_is_not_finite_breaks_nothing() -> None:
    """The trainer masks such tokens before; whoever does not gets NaN and no index out of bounds."""
    statistics = statistics_of("none", torch.tensor([torch.nan, 0.0]), torch.zeros(2), torch.ones(2))
    assert math.isnan(statistics.metrics()["mean_abs_delta_logprob"])
