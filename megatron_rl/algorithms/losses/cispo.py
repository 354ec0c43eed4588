"""CISPO: a policy gradient weighted by the clipped, detached ratio (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithms import Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Loss(Extension):
    """``-sg[clip(rho, 1 - eps_lower, 1 + eps_upper)] A log pi_current``; clipped tokens keep a gradient.

    Only the gradient is meaningful, not the value. Tokens count as clipped for any sign of the advantage.
    """

    clamp_eps_lower: float = option(1.0, gt=0, le=1)
    """The ratio is clipped below at ``1 - clamp_eps_lower``; 1 is no clip, as in the paper."""
    clamp_eps_upper: float = option(0.2, gt=0)
    """The ratio is clipped above at ``1 + clamp_eps_upper``; the paper gives no number."""

    def __call__(self, batch: LossInputs) -> Terms:
        lower, upper = 1 - self.clamp_eps_lower, 1 + self.clamp_eps_upper
        in_loss = batch.in_loss
        ratio = log_ratio(batch.current_logprobs, batch.old_logprobs, batch.loss_mask).exp().detach()
        trusted_logprobs = torch.where(in_loss, batch.current_logprobs.float(), 0.0)
        loss = -ratio.clamp(lower, upper) * batch.advantages * trusted_logprobs
        clipped = in_loss & ((ratio < lower) | (ratio > upper))
        return torch.where(in_loss, loss, 0.0), {
            "actor/pg_clipfrac": clipped,
            "actor/pg_clipfrac_lower": torch.zeros_like(clipped),  # there is no dual clip
        }
