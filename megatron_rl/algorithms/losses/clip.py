"""The clipped policy loss of PPO and GRPO with the ratio of each token (arXiv 1707.06347, 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Loss(Extension):
    """``clipped_surrogate`` of ``rho = pi_current / pi_old`` at each token."""

    clamp_eps_lower: float = option(0.2, gt=0, le=1)
    """The ratio is clipped below at ``1 - clamp_eps_lower``; 1 is no clip."""
    clamp_eps_upper: float = option(0.2, gt=0)
    """The ratio is clipped above at ``1 + clamp_eps_upper``."""
    dual_clip: float | None = option(None, gt=1)
    """Caps the loss of negative advantages at ``dual_clip * |A|``; None is off. Must be above 1, or unchanged tokens
    would lose their gradient.
    """

    def __call__(self, batch: LossInputs) -> Terms:
        ratio = log_ratio(batch.current_logprobs, batch.old_logprobs, batch.loss_mask).exp()
        return self.clipped_surrogate(ratio, batch)

    def clipped_surrogate(self, ratio: Tensor, batch: LossInputs) -> Terms:
        """Return ``max(-ratio A, -clip(ratio, 1 - eps_lower, 1 + eps_upper) A)``, dual-clipped for ``A < 0``.

        PPO, arXiv 1707.06347, eq. 7, negated to be minimised; separate bounds as in DAPO, arXiv 2503.14476; dual clip
        ``min(., -c A)`` of arXiv 1912.09729: without it a token that became much more likely is pushed down with an
        unbounded ratio.

        Args:
            ratio: [T] fp32, positive, with gradient; 1 at masked positions.
            batch: provides the advantages.
        """
        lower, upper = 1 - self.clamp_eps_lower, 1 + self.clamp_eps_upper
        in_loss, advantages = batch.in_loss, batch.advantages
        gain = in_loss & (advantages > 0)
        harm = in_loss & (advantages < 0)

        loss = torch.maximum(-ratio * advantages, -ratio.clamp(lower, upper) * advantages)
        dual_clipped = torch.zeros_like(harm)
        if self.dual_clip is not None:
            loss = torch.where(harm, torch.minimum(loss, -self.dual_clip * advantages), loss)
            dual_clipped = harm & (ratio > self.dual_clip)
        return torch.where(in_loss, loss, 0.0), {
            "actor/pg_clipfrac": (harm & (ratio < lower)) | (gain & (ratio > upper)),
            "actor/pg_clipfrac_lower": dual_clipped,
        }
