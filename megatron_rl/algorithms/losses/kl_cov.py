"""KL-Cov: a penalty on the tokens whose log-prob and advantage vary together the most (arXiv 2505.22617)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import Terms, TokenBatch, log_ratio, option
from megatron_rl.algorithms.covariance import TokenSelection


@dataclass(frozen=True, kw_only=True)
class Loss(TokenSelection):
    """``-rho A``, and ``+ beta |log rho|`` at the tokens picked: those of the largest covariance. Nothing is clipped.

    ``|log rho|`` is the authors' estimate of the KL to the policy before the update. Its gradient at rho = 1 is 0, so
    in the first update of a rollout the penalty does nothing. Not reduced, so it has no denominator of its own.
    """

    beta: float = option(1.0, ge=0)
    """Weight of the penalty."""

    def priority(self, batch: TokenBatch, covariance: Tensor) -> Tensor:
        """See ``TokenSelection``."""
        return covariance

    def __call__(self, batch: TokenBatch) -> Terms:
        """See ``Extension``."""
        shift = log_ratio(batch.current_logprobs, batch.old_logprobs, batch.loss_mask)
        loss = torch.where(batch.in_loss, -shift.exp() * batch.advantages, 0.0)
        if batch.picked is None:
            return loss, {}
        penalty = torch.where(batch.picked & batch.in_loss, self.beta * shift.abs(), 0.0)
        return loss + penalty, {"actor/picked_tokens": batch.picked, "actor/picked_kl": penalty.detach()}
