"""Masked importance sampling: tokens on which trainer and engine disagree too much are left out."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig
from megatron_rl.algorithms.ratios import log_ratio

LEVEL = "token"
DEFAULT_BOUNDS = (0.5, 2.0)
"""A quantised rollout has a mean gap of about 0.02 nats: only outliers lie outside."""


@torch.no_grad()
def compute(
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """``pi_old / pi_inference`` inside ``[lower, upper]``, 0 outside.

    The denominator is the one before rejection. Args and result as in ``interfaces.CorrectionFunction``.
    """
    del sequence_index, num_sequences  # tokens are weighed one by one
    in_loss = loss_mask > 0
    lower, upper = config.ratio_bounds(DEFAULT_BOUNDS)
    ratio = log_ratio(old_logprobs, inference_logprobs, loss_mask).exp()
    rejected = in_loss & ((ratio < lower) | (ratio > upper))
    return Correction(weights=torch.where(in_loss & ~rejected, ratio, 0.0), clipped=rejected)
