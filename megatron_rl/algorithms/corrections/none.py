"""No correction: every token has the weight 1, and what the mismatch does to the gradient stays."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig

LEVEL = "token"


def compute(
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """1 at loss tokens. Args and result as in ``interfaces.CorrectionFunction``."""
    del old_logprobs, inference_logprobs, sequence_index, num_sequences, config  # every correction has them
    in_loss = loss_mask > 0
    return Correction(weights=in_loss.float(), clipped=torch.zeros_like(in_loss))
