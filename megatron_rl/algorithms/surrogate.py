"""The clipped surrogate objective, whatever the ratio is taken over (a token, a sequence)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import LossConfig, PolicyLoss


def clipped_surrogate(ratio: Tensor, advantages: Tensor, loss_mask: Tensor, config: LossConfig) -> PolicyLoss:
    """``max(-ratio A, -clip(ratio, 1 - eps_lower, 1 + eps_upper) A)``, and its dual clip for ``A < 0``.

    PPO, arXiv 1707.06347, eq. 7, with a sign because it is minimised; the two bounds differ as in DAPO, arXiv
    2503.14476; dual clip ``min(., -c A)`` from arXiv 1912.09729: without it a token the new policy likes much
    better than the old one did is pushed down with an unbounded ratio.

    Args:
        ratio: [T] fp32, positive, with gradient; 1 at masked positions.
        advantages: [T] fp32.
        loss_mask: [T] fp32.
        config: the clip range.
    """
    lower, upper = 1 - config.clamp_eps_lower, 1 + config.clamp_eps_upper
    in_loss = loss_mask > 0
    gain = in_loss & (advantages > 0)
    harm = in_loss & (advantages < 0)

    loss = torch.maximum(-ratio * advantages, -ratio.clamp(lower, upper) * advantages)
    dual_clipped = torch.zeros_like(harm)
    if config.dual_clip is not None:
        loss = torch.where(harm, torch.minimum(loss, -config.dual_clip * advantages), loss)
        dual_clipped = harm & (ratio > config.dual_clip)

    return PolicyLoss(
        per_token=torch.where(in_loss, loss, 0.0),
        num_clipped_lower=(harm & (ratio < lower)).sum().float(),
        num_clipped_upper=(gain & (ratio > upper)).sum().float(),
        num_dual_clipped=dual_clipped.sum().float(),
    )
