"""KL-Cov: a penalty on the tokens with the highest covariance of log-prob and advantage (arXiv 2505.22617)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import Terms, TokenBatch, log_ratio, option
from megatron_rl.algorithms.covariance import TokenSelection


@dataclass(frozen=True, kw_only=True)
class Loss(TokenSelection):
    """``-rho A``, plus ``beta |log rho|`` at the tokens with the largest covariance. No clipping.

    ``|log rho|`` is the authors' estimate of the KL to the policy before the update. Its gradient at rho = 1 is 0, so
    the penalty has no effect in a rollout's first update. It shares the loss's denominator.
    """

    beta: float = option(1.0, ge=0)
    """Weight of the penalty."""

    def priority(self, batch: TokenBatch, covariance: Tensor) -> Tensor:
        return covariance

    def __call__(self, batch: TokenBatch) -> Terms:
        shift = log_ratio(batch.current_logprobs, batch.old_logprobs, batch.loss_mask)
        loss = torch.where(batch.in_loss, -shift.exp() * batch.advantages, 0.0)
        if batch.selected is None:
            return loss, {}
        penalty = torch.where(batch.selected & batch.in_loss, self.beta * shift.abs(), 0.0)
        return loss + penalty, {"actor/picked_tokens": batch.selected, "actor/picked_kl": penalty.detach()}
