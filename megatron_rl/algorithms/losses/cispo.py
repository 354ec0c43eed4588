"""CISPO: a policy gradient weighted by the clipped, detached ratio (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import LossConfig, PolicyLoss
from megatron_rl.algorithms.ratios import log_ratio

DEFAULT_CLAMP = (1.0, 0.2)
"""The paper leaves the lower side open and gives no number for the upper one."""
HAS_DUAL_CLIP = False


def compute(
    current_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: LossConfig,
) -> PolicyLoss:
    """``-sg[clip(rho, 1 - eps_lower, 1 + eps_upper)] A log pi_current``; a clipped token keeps its gradient.

    The value is no distance of any kind, only its gradient means something. Args and result as in
    ``interfaces.LossFunction``; a token counts as clipped whatever the sign of its advantage; dual clip does not apply.
    """
    del sequence_index, num_sequences  # tokens are independent; the signature is that of every loss
    lower, upper = 1 - config.clamp_eps_lower, 1 + config.clamp_eps_upper
    in_loss = loss_mask > 0
    ratio = log_ratio(current_logprobs, old_logprobs, loss_mask).exp().detach()
    trusted_logprobs = torch.where(in_loss, current_logprobs.float(), 0.0)
    loss = -ratio.clamp(lower, upper) * advantages * trusted_logprobs
    return PolicyLoss(
        per_token=torch.where(in_loss, loss, 0.0),
        num_clipped_lower=(in_loss & (ratio < lower)).sum().float(),
        num_clipped_upper=(in_loss & (ratio > upper)).sum().float(),
        num_dual_clipped=ratio.new_zeros(()),
    )
