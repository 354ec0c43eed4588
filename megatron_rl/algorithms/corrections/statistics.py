"""How far the engine's policy is from the trainer's: logged in every step, whatever the correction.

Statistics stay on the device as sums and maxima, so that micro-batches and ranks are combined by one SUM and
one MAX all-reduce, and are read once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction
from megatron_rl.algorithms.kl import kl_per_token
from megatron_rl.algorithms.ratios import log_ratio


@dataclass(frozen=True)
class MismatchStatistics:
    """Sums over loss tokens and one maximum; each field is [] fp64, detached."""

    num_tokens: Tensor
    weight_sum: Tensor
    weight_square_sum: Tensor
    num_clipped: Tensor
    abs_delta_sum: Tensor
    """Of ``|log pi_old - log pi_inference|``, nats."""
    k3_sum: Tensor
    """Of the k3 estimate of ``KL(inference || old)``, nats."""
    abs_delta_max: Tensor
    """Nats; 0 without tokens."""

    def sum_tensor(self) -> Tensor:
        """[6] fp64: what is combined by SUM, in the order of the fields."""
        return torch.stack(
            [
                self.num_tokens,
                self.weight_sum,
                self.weight_square_sum,
                self.num_clipped,
                self.abs_delta_sum,
                self.k3_sum,
            ]
        )

    def max_tensor(self) -> Tensor:
        """[1] fp64: what is combined by MAX."""
        return self.abs_delta_max.reshape(1)

    @classmethod
    def from_tensors(cls, sums: Tensor, maxima: Tensor) -> MismatchStatistics:
        """The inverse of ``sum_tensor`` and ``max_tensor``."""
        return cls(*sums.unbind(), *maxima.unbind())

    def merge(self, other: MismatchStatistics) -> MismatchStatistics:
        """Both together, as if their tokens had been one batch."""
        return MismatchStatistics.from_tensors(
            self.sum_tensor() + other.sum_tensor(), torch.maximum(self.max_tensor(), other.max_tensor())
        )

    def metrics(self) -> dict[str, float]:
        """Means, fractions and the maximum for the log; the one read of the device.

        ``effective_sample_size`` is Kish's ``(sum w)^2 / sum w^2`` as a fraction of the tokens: 1 when all
        weights are equal. Without tokens everything is 0.
        """
        tokens, weight, weight_square, clipped, abs_delta, k3 = self.sum_tensor().tolist()
        tokens = max(tokens, 1.0)
        return {
            "mean_weight": weight / tokens,
            "effective_sample_size": weight**2 / (tokens * weight_square) if weight_square else 0.0,
            "fraction_clipped": clipped / tokens,
            "mean_abs_delta_logprob": abs_delta / tokens,
            "max_abs_delta_logprob": float(self.abs_delta_max),
            "k3_kl": k3 / tokens,
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
    delta = log_ratio(old_logprobs, inference_logprobs, loss_mask).abs().double()
    weights = correction.weights.double()
    return MismatchStatistics(
        num_tokens=(loss_mask > 0).sum().double(),
        weight_sum=weights.sum(),
        weight_square_sum=weights.square().sum(),
        num_clipped=correction.clipped.sum().double(),
        abs_delta_sum=delta.sum(),
        k3_sum=kl_per_token("k3", inference_logprobs, old_logprobs, loss_mask).double().sum(),
        abs_delta_max=torch.cat([delta, delta.new_zeros(1)]).max(),
    )
