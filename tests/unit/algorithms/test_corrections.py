"""Mismatch corrections and their statistics on numbers worked out by hand.

Ratios old / inference of the loss tokens: 3, 0.6, 0.25, 1; the last token is masked.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.corrections import masked_is, none, token_tis
from megatron_rl.algorithms.corrections.statistics import MismatchStatistics, mismatch_statistics
from megatron_rl.algorithms.interfaces import CorrectionConfig
from megatron_rl.errors import ConfigError

INFERENCE = torch.tensor([-1.0, -2.0, -0.5, -4.0, torch.nan])
OLD = INFERENCE + torch.tensor([3.0, 0.6, 0.25, 1.0, 1.0]).log()
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
CONFIG = CorrectionConfig(cap=2.0, lower=0.5, upper=2.0)


@pytest.mark.parametrize(
    ("correction", "weights", "clipped"),
    [
        (none, [1.0, 1.0, 1.0, 1.0, 0.0], [False] * 5),
        (token_tis, [2.0, 0.6, 0.25, 1.0, 0.0], [True, False, False, False, False]),
        (masked_is, [0.0, 0.6, 0.0, 1.0, 0.0], [True, False, True, False, False]),
    ],
)
def test_weights(correction, weights: list[float], clipped: list[bool]) -> None:
    result = correction.compute(OLD, INFERENCE, MASK, CONFIG)
    torch.testing.assert_close(result.weights, torch.tensor(weights))
    assert result.clipped.tolist() == clipped


def test_weights_are_detached() -> None:
    old = torch.zeros(2).requires_grad_()
    for correction in (none, token_tis, masked_is):
        assert not correction.compute(old, torch.zeros(2), torch.ones(2), CONFIG).weights.requires_grad


def two_token_statistics() -> MismatchStatistics:
    """Ratios 3 and 0.5, weights 2 and 0.5."""
    old, inference = torch.tensor([3.0, 0.5]).log(), torch.zeros(2)
    correction = token_tis.compute(old, inference, torch.ones(2), CONFIG)
    return mismatch_statistics(old, inference, torch.ones(2), correction)


def test_statistics() -> None:
    metrics = two_token_statistics().metrics()
    assert metrics == pytest.approx(
        {
            "mean_weight": 1.25,  # (2 + 0.5) / 2
            "effective_sample_size": 0.735294,  # 2.5^2 / (2 * (4 + 0.25))
            "fraction_clipped": 0.5,
            "mean_abs_delta_logprob": 0.895880,  # (1.098612 + 0.693147) / 2
            "max_abs_delta_logprob": 1.098612,
            # KL(inference || old), r = old / inference, r - 1 - log r: 3 - 1 - 1.098612, 0.5 - 1 + 0.693147.
            "k3_kl": (0.901388 + 0.193147) / 2,
        },
        rel=1e-5,
    )


def test_statistics_of_parts_merge_to_those_of_the_whole() -> None:
    correction = masked_is.compute(OLD, INFERENCE, MASK, CONFIG)
    whole = mismatch_statistics(OLD, INFERENCE, MASK, correction).metrics()
    parts = []
    for part in (slice(0, 2), slice(2, 5)):
        correction = masked_is.compute(OLD[part], INFERENCE[part], MASK[part], CONFIG)
        parts.append(mismatch_statistics(OLD[part], INFERENCE[part], MASK[part], correction))
    assert parts[0].merge(parts[1]).metrics() == pytest.approx(whole)
    assert all(math.isfinite(value) for value in whole.values())


def test_statistics_survive_the_trip_through_tensors() -> None:
    statistics = two_token_statistics()
    assert statistics.sum_tensor().shape == (6,)
    assert statistics.max_tensor().shape == (1,)
    again = MismatchStatistics.from_tensors(statistics.sum_tensor(), statistics.max_tensor())
    assert again.metrics() == statistics.metrics()


def test_statistics_of_nothing_are_zero() -> None:
    empty = torch.zeros(0)
    correction = none.compute(empty, empty, empty, CONFIG)
    assert set(mismatch_statistics(empty, empty, empty, correction).metrics().values()) == {0.0}


def test_an_empty_acceptance_range_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        CorrectionConfig(cap=0.0, lower=2.0, upper=0.5)
    assert len(refused.value.problems) == 2
