"""Geometric rejection: sequences on which trainer and engine disagree on average are left out.

Source: https://richardli.xyz/rl-collapse-3; the mean log ratio of a sequence is GSPO's (arXiv 2507.18071).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import sequence_means
from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig
from megatron_rl.algorithms.ratios import log_ratio

LEVEL = "sequence"
DEFAULT_BOUNDS = (0.99, 1.01)
"""The mean over a sequence is far narrower than the ratios of its tokens."""


@torch.no_grad()
def compute(
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """1 for sequences whose ``exp(mean log ratio over loss tokens)`` lies in ``[lower, upper]``, else 0.

    It rejects and does not weigh: compose it with ``token_tis`` to do both. The denominator is the one before
    rejection. Args and result as in ``interfaces.CorrectionFunction``.
    """
    in_loss = loss_mask > 0
    lower, upper = config.ratio_bounds(DEFAULT_BOUNDS)
    log_ratios = log_ratio(old_logprobs, inference_logprobs, loss_mask)
    ratio = sequence_means(log_ratios, loss_mask, sequence_index, num_sequences).exp()
    rejected = in_loss & ((ratio < lower) | (ratio > upper))[sequence_index]
    return Correction(weights=(in_loss & ~rejected).float(), clipped=rejected)
