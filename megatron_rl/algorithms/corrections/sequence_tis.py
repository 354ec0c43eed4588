"""Truncated importance sampling with the ratio of the whole sequence (https://richardli.xyz/rl-collapse)."""

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
    """``min(exp(sum of log ratios over the sequence's loss tokens), cap)``, at each of its loss tokens.

    Unbiased but for the cap, at a variance that grows exponentially with the length: noise of 0.1 nats a
    token is 6 nats after 4096 tokens. Args and result as in ``interfaces.CorrectionFunction``.
    """
    in_loss = loss_mask > 0
    log_ratios = log_ratio(old_logprobs, inference_logprobs, loss_mask).double()
    # In fp64, because index_add adds in no fixed order on a GPU. A sum that overflows exp is held at the cap.
    sums = log_ratios.new_zeros(num_sequences).index_add(0, sequence_index, log_ratios)
    ratio = sums.exp().float()[sequence_index]
    return Correction(
        weights=torch.where(in_loss, ratio.clamp_max(config.cap), 0.0), clipped=in_loss & (ratio > config.cap)
    )
