"""Veto: one token that the trainer holds for all but impossible rejects its sequence.

Source: verl (2025), `rollout_token_veto_threshold`, there also 1e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig
from megatron_rl.algorithms.ratios import log_ratio

LEVEL = "sequence"


@torch.no_grad()
def compute(
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """1, and 0 for sequences with a loss token of ``pi_old / pi_inference < veto``.

    It guards against broken tokens and does not weigh: compose it, as in ``token_tis+veto``. The denominator
    is the one before rejection. Args and result as in ``interfaces.CorrectionFunction``.
    """
    in_loss = loss_mask > 0
    ratio = log_ratio(old_logprobs, inference_logprobs, loss_mask).exp()
    vetoes = (in_loss & (ratio < config.veto)).long()
    counts = vetoes.new_zeros(num_sequences).index_add(0, sequence_index, vetoes)
    rejected = in_loss & (counts > 0)[sequence_index]
    return Correction(weights=(in_loss & ~rejected).float(), clipped=rejected)
