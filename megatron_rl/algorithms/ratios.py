"""The log-ratio of two policies at a token: the one place where it is masked, made fp32 and bounded."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Nats. Unbounded, exp overflows fp32 at 88 nats and one such token turns the loss of the batch into inf or
NaN; exp(20) = 4.9e8 is far beyond every clip range, and its square still fits."""


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """``log(numerator / denominator)`` of each token, within ``LOG_RATIO_LIMIT``, 0 at masked positions.

    Args:
        numerator_logprobs: [T]; the gradient flows through it where it needs one.
        denominator_logprobs: [T].
        loss_mask: [T] fp32.

    Returns:
        [T] fp32. Masked positions may hold NaN: neither value nor gradient passes.
    """
    difference = numerator_logprobs.float() - denominator_logprobs.float()
    return torch.where(loss_mask > 0, difference, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
