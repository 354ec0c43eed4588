"""Metrics of the mismatch between the policies of rollout engine and trainer, in every step.

Statistics stay on the device as sums and maxima, combined over micro-batches and ranks by one SUM and one MAX
all-reduce, and are read once per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import LOG_RATIO_LIMIT, TokenBatch, log_ratio
from megatron_rl.algorithms.extension import CLIPPED, Function, level_of
from megatron_rl.algorithms.kl import kl_per_token

HISTOGRAM_BINS = 256
"""Log-spaced, 8.7 % wide each, which bounds the error of a percentile."""
HISTOGRAM_START = 1e-8
"""Nats. Unequal fp32 log-probs are rarely closer; the last bin ends at ``LOG_RATIO_LIMIT``."""
_LOG_BIN_WIDTH = math.log(LOG_RATIO_LIMIT / HISTOGRAM_START) / HISTOGRAM_BINS

COLLAPSED = 0.5
"""Threshold of mean weight and effective sample size: below it, most of a rollout's tokens have no effect."""
_WORSE, _ROUNDING = 1.25, 1e-5
"""Tolerated increase of the gap by a correction: a factor and an fp32 rounding error. More means wrong weights."""


@torch.no_grad()
def mismatch_sums(batch: TokenBatch, weights: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """Sum the statistics of one micro-batch over its loss tokens, fp64, without waiting for the device.

    ``delta`` is ``log(pi_old / pi_inference)`` in nats, clamped to ``batch.LOG_RATIO_LIMIT``; k3 estimates
    ``KL(inference || old)``. ``fresh`` tokens were drawn by the trainer's current weights, so both should agree.

    Args:
        batch: with old log-probs.
        weights: [T] of the correction, 0 at masked positions.
        clipped: [T] bool, loss tokens that it capped or rejected.
    """
    in_loss = batch.in_loss
    delta = log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask).double()
    weights = weights.double()
    weighed = in_loss & (weights > 0) & ~clipped
    left = (torch.where(weighed, weights, 1.0).log() - delta).abs()
    k3 = kl_per_token("k3", batch.inference_logprobs, batch.old_logprobs, batch.loss_mask)
    is_fresh = in_loss & (batch.lag == 0)
    gap = torch.where(is_fresh, delta.abs(), 0.0)
    return {
        "mismatch/tokens": in_loss.sum(),
        "mismatch/weight": weights.sum(),
        "mismatch/weight_square": weights.square().sum(),
        "mismatch/clipped": clipped.sum(),
        "mismatch/delta": delta.sum(),
        "mismatch/delta_square": delta.square().sum(),
        "mismatch/abs_delta": delta.abs().sum(),
        "mismatch/k3": k3.double().sum(),
        "mismatch/weighed": weighed.sum(),
        "mismatch/residual": torch.where(weighed, left, 0.0).sum(),
        "mismatch/histogram": _histogram(delta.abs(), in_loss),
        "mismatch/fresh_tokens": is_fresh.sum(),
        "mismatch/fresh_abs_delta": gap.sum(),
        "mismatch/fresh_abs_delta_max": torch.cat([gap, gap.new_zeros(1)]).max(),
        "mismatch/abs_delta_max": torch.cat([delta.abs(), delta.new_zeros(1)]).max(),
    }


def mismatch_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute the logged metrics from the sums of ``mismatch_sums`` over a step.

    The effective sample size is Kish's ``(sum w)^2 / sum w^2`` as a fraction of the tokens: 1 for equal weights. The
    residual gap is the mean of ``|log weight - delta|`` over weighted, unclipped tokens: 0 if the weights are the
    ratios, the whole gap for weights of 1, twice the gap for inverted ratios. Without tokens all are 0; metrics of
    fresh and stale tokens exist only with such tokens.
    """
    of = {name.removeprefix("mismatch/"): float(value) for name, value in sums.items() if value.numel() == 1}
    tokens = max(of["tokens"], 1.0)
    weight, weight_square = of["weight"], of["weight_square"]
    mean, largest = of["delta"] / tokens, of["abs_delta_max"]
    # Rounding can make the variance of equal deltas negative.
    variance = max(of["delta_square"] / tokens - mean**2, 0.0)
    by_age: dict[str, float] = {}
    if fresh := of["fresh_tokens"]:
        by_age["training/rollout_logprob_gap_mean"] = of["fresh_abs_delta"] / fresh
        by_age["training/rollout_logprob_gap_max"] = of["fresh_abs_delta_max"]
    if stale := of["tokens"] - fresh:
        by_age["rollout_corr/stale_abs_log_ratio_mean"] = (of["abs_delta"] - of["fresh_abs_delta"]) / stale
    return by_age | {
        "rollout_corr/abs_log_ratio_mean": of["abs_delta"] / tokens,
        "rollout_corr/k3_kl": of["k3"] / tokens,
        "rollout_corr/log_ratio_mean": mean,
        "rollout_corr/log_ratio_std": math.sqrt(variance),
        "rollout_corr/abs_log_ratio_p95": min(_percentile(sums["mismatch/histogram"].tolist(), 0.95), largest),
        "rollout_corr/residual_gap": of["residual"] / max(of["weighed"], 1.0),
        "rollout_corr/rollout_is_mean": weight / tokens,
        "rollout_corr/rollout_is_eff_sample_size": weight**2 / (tokens * weight_square) if weight_square else 0.0,
        CLIPPED: of["clipped"] / tokens,
    }


def correction_problem(name: str, correction: Function, metrics: Mapping[str, float]) -> str | None:
    """Return one line if a correction failed, else None.

    Per sequence: too little total weight, because log ratios accumulate. Per token: a larger gap than before. ``name``
    as in ``--rl-correction``, ``metrics`` of the step by logged name.
    """
    if level_of(correction) == "sequence":
        weight = metrics.get("rollout_corr/rollout_is_mean", 1.0)
        size = metrics.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
        no_tokens = not weight and not metrics[CLIPPED]
        if no_tokens or (weight >= COLLAPSED and size >= COLLAPSED):
            return None
        return (
            f"--rl-correction {name} leaves a mean weight of {weight:.3f} and an effective sample size of "
            f"{size:.3f} of the tokens (below {COLLAPSED}): the log ratios of long sequences add up, and most of the "
            "rollout teaches nothing; use --rl-correction token_tis"
        )
    gap = metrics.get("rollout_corr/abs_log_ratio_mean", 0.0)
    left = metrics.get("rollout_corr/residual_gap", 0.0)
    if left <= _WORSE * gap + _ROUNDING:
        return None
    return (
        f"--rl-correction {name} leaves a mean log-prob gap of {left:.3g} where there was one of {gap:.3g}: its "
        "weights point the wrong way; use --rl-correction token_tis"
    )


def _histogram(values: Tensor, counted: Tensor) -> Tensor:
    """Count ``values`` where ``counted`` by size: [1 + HISTOGRAM_BINS] fp64, first those below ``HISTOGRAM_START``.

    Unlike ``bincount`` it does not wait for the device, and NaN falls into some bin instead of out of bounds.
    """
    bins = ((values.clamp_min(1e-300) / HISTOGRAM_START).log() / _LOG_BIN_WIDTH).floor().long() + 1
    bins = bins.clamp(0, HISTOGRAM_BINS)
    return values.new_zeros(1 + HISTOGRAM_BINS).index_add(0, bins, counted.double())  # exact in any order


def _percentile(counts: list[float], share: float) -> float:
    """Return the quantile ``share`` of a histogram, interpolated within its bin; 0 in the first bin."""
    wanted, below = share * sum(counts), 0.0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            position = index - 1 + (wanted - below) / count
            return HISTOGRAM_START * math.exp(position * _LOG_BIN_WIDTH) if index else 0.0
        below += count
    return 0.0
