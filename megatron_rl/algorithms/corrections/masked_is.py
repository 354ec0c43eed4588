"""Masked importance sampling: tokens on which trainer and engine disagree too much are left out."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig
from megatron_rl.algorithms.ratios import log_ratio


@torch.no_grad()
def compute(
    old_logprobs: Tensor, inference_logprobs: Tensor, loss_mask: Tensor, config: CorrectionConfig
) -> Correction:
    """``pi_old / pi_inference`` inside ``[lower, upper]``, 0 outside.

    The denominator is the one before rejection. Args and result as in ``interfaces.CorrectionFunction``.
    """
    in_loss = loss_mask > 0
    ratio = log_ratio(old_logprobs, inference_logprobs, loss_mask).exp()
    rejected = in_loss & ((ratio < config.lower) | (ratio > config.upper))
    return Correction(weights=torch.where(in_loss & ~rejected, ratio, 0.0), clipped=rejected)
