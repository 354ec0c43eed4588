"""Truncated importance sampling, token by token (https://fengyao.notion.site/off-policy-rl)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig
from megatron_rl.algorithms.ratios import log_ratio

LEVEL = "token"


@torch.no_grad()
def compute(
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """``min(pi_old / pi_inference, cap)``. Args and result as in ``interfaces.CorrectionFunction``."""
    del sequence_index, num_sequences  # tokens are weighed one by one
    in_loss = loss_mask > 0
    ratio = log_ratio(old_logprobs, inference_logprobs, loss_mask).exp()
    return Correction(
        weights=torch.where(in_loss, ratio.clamp_max(config.cap), 0.0), clipped=in_loss & (ratio > config.cap)
    )
