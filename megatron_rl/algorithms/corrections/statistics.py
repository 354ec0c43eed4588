"""How far the engine's policy is from the trainer's: logged in every step, whatever the correction.

Statistics stay on the device as sums and maxima, so that micro-batches and ranks are combined by one SUM and
one MAX all-reduce, and are read once a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction
from megatron_rl.algorithms.kl import kl_per_token
from megatron_rl.algorithms.ratios import LOG_RATIO_LIMIT, log_ratio

HISTOGRAM_BINS = 256
"""Log-spaced, so each is 8.7 % wide: that bounds the error of a percentile."""
HISTOGRAM_START = 1e-8
"""Nats. fp32 log-probs are hardly ever closer without being equal; the last bin ends at ``LOG_RATIO_LIMIT``."""
_LOG_BIN_WIDTH = math.log(LOG_RATIO_LIMIT / HISTOGRAM_START) / HISTOGRAM_BINS


@dataclass(frozen=True)
class MismatchStatistics:
    """Sums over loss tokens and one maximum, fp64 and detached; [] where no shape is given.

    ``delta`` is ``log(pi_old / pi_inference)`` in nats. A new sum is one more field before the histogram.
    """

    num_tokens: Tensor
    weight_sum: Tensor
    weight_square_sum: Tensor
    num_clipped: Tensor
    delta_sum: Tensor
    delta_square_sum: Tensor
    abs_delta_sum: Tensor
    k3_sum: Tensor
    """Of the k3 estimate of ``KL(inference || old)``, nats."""
    num_weighed: Tensor
    """Tokens with a positive weight that were not clipped."""
    residual_sum: Tensor
    """Over those tokens, of ``|log weight - delta|``: the gap that the weight leaves."""
    abs_delta_histogram: Tensor
    """[1 + HISTOGRAM_BINS]: tokens by ``|delta|``, first those below ``HISTOGRAM_START``."""
    abs_delta_max: Tensor
    """0 without tokens."""

    def sum_tensor(self) -> Tensor:
        """[S] fp64: what is combined by SUM, in the order of the fields."""
        scalars = [getattr(self, field.name) for field in fields(self)[:-2]]
        return torch.cat((torch.stack(scalars), self.abs_delta_histogram))

    def max_tensor(self) -> Tensor:
        """[1] fp64: what is combined by MAX."""
        return self.abs_delta_max.reshape(1)

    @classmethod
    def from_tensors(cls, sums: Tensor, maxima: Tensor) -> MismatchStatistics:
        """The inverse of ``sum_tensor`` and ``max_tensor``."""
        scalars, histogram = sums.tensor_split([len(fields(cls)) - 2])
        return cls(*scalars.unbind(), histogram, *maxima.unbind())

    @classmethod
    def zeros(cls, device: torch.device) -> MismatchStatistics:
        """Of no tokens: what merging starts from."""
        size = len(fields(cls)) - 2 + 1 + HISTOGRAM_BINS
        sums = torch.zeros(size, dtype=torch.float64, device=device)
        return cls.from_tensors(sums, sums.new_zeros(1))

    def merge(self, other: MismatchStatistics) -> MismatchStatistics:
        """Both together, as if their tokens had been one batch."""
        return MismatchStatistics.from_tensors(
            self.sum_tensor() + other.sum_tensor(), torch.maximum(self.max_tensor(), other.max_tensor())
        )

    def metrics(self) -> dict[str, float]:
        """Means, fractions and the maximum for the log; the one read of the device.

        ``effective_sample_size`` is Kish's ``(sum w)^2 / sum w^2`` as a fraction of the tokens: 1 when all
        weights are equal. ``residual_gap`` is the mean over the tokens that were weighed and not clipped: 0 for
        weights that are the ratios, the whole gap for weights of 1, twice the gap for inverted ratios. Without
        tokens everything is 0.
        """
        sums = self.sum_tensor()
        read = torch.cat((sums, self.max_tensor())).cpu()
        host = MismatchStatistics.from_tensors(*read.tensor_split([sums.numel()]))
        tokens = max(float(host.num_tokens), 1.0)
        weight, weight_square = float(host.weight_sum), float(host.weight_square_sum)
        mean, largest = float(host.delta_sum) / tokens, float(host.abs_delta_max)
        # Rounding can take the variance of equal deltas below 0.
        variance = max(float(host.delta_square_sum) / tokens - mean**2, 0.0)
        return {
            "mean_weight": weight / tokens,
            "effective_sample_size": weight**2 / (tokens * weight_square) if weight_square else 0.0,
            "fraction_clipped": float(host.num_clipped) / tokens,
            "mean_delta_logprob": mean,
            "std_delta_logprob": math.sqrt(variance),
            "mean_abs_delta_logprob": float(host.abs_delta_sum) / tokens,
            "p95_abs_delta_logprob": min(_percentile(host.abs_delta_histogram.tolist(), 0.95), largest),
            "max_abs_delta_logprob": largest,
            "k3_kl": float(host.k3_sum) / tokens,
            "residual_gap": float(host.residual_sum) / max(float(host.num_weighed), 1.0),
        }


@torch.no_grad()
def mismatch_statistics(
    old_logprobs: Tensor, inference_logprobs: Tensor, loss_mask: Tensor, correction: Correction
) -> MismatchStatistics:
    """Statistics of one micro-batch, without waiting for the device.

    Differences are bounded by ``ratios.LOG_RATIO_LIMIT``. The engine drew the tokens, so the k3 estimate is
    of ``KL(inference || old)``.

    Args:
        old_logprobs: [T] of the trainer's model before the step's updates.
        inference_logprobs: [T] of the engine.
        loss_mask: [T] fp32; masked positions may hold anything.
        correction: what was applied to these tokens.
    """
    in_loss = loss_mask > 0
    delta = log_ratio(old_logprobs, inference_logprobs, loss_mask).double()
    weights = correction.weights.double()
    weighed = in_loss & (weights > 0) & ~correction.clipped
    left = (torch.where(weighed, weights, 1.0).log() - delta).abs()
    return MismatchStatistics(
        num_tokens=in_loss.sum().double(),
        weight_sum=weights.sum(),
        weight_square_sum=weights.square().sum(),
        num_clipped=correction.clipped.sum().double(),
        delta_sum=delta.sum(),
        delta_square_sum=delta.square().sum(),
        abs_delta_sum=delta.abs().sum(),
        k3_sum=kl_per_token("k3", inference_logprobs, old_logprobs, loss_mask).double().sum(),
        num_weighed=weighed.sum().double(),
        residual_sum=torch.where(weighed, left, 0.0).sum(),
        abs_delta_histogram=_histogram(delta.abs(), in_loss),
        abs_delta_max=torch.cat([delta.abs(), delta.new_zeros(1)]).max(),
    )


def _histogram(values: Tensor, counted: Tensor) -> Tensor:
    """How many of ``values`` [T] fp64, where ``counted`` [T] bool, lie in each bin: [1 + HISTOGRAM_BINS] fp64.

    Unlike ``bincount`` it does not wait for the device, and a NaN falls into some bin instead of out of bounds.
    """
    bins = ((values.clamp_min(1e-300) / HISTOGRAM_START).log() / _LOG_BIN_WIDTH).floor().long() + 1
    bins = bins.clamp(0, HISTOGRAM_BINS)
    return values.new_zeros(1 + HISTOGRAM_BINS).index_add(0, bins, counted.double())


def _percentile(counts: list[float], share: float) -> float:
    """The value below which ``share`` of a histogram lies, interpolated inside its bin; 0 in the first bin."""
    wanted, below = share * sum(counts), 0.0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            position = index - 1 + (wanted - below) / count
            return HISTOGRAM_START * math.exp(position * _LOG_BIN_WIDTH) if index else 0.0
        below += count
    return 0.0
