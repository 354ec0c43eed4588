"""Reward normalised by the mean and standard deviation of the whole batch (REINFORCE++, arXiv 2501.03262).

The batch is what the caller passes: rewards of a step that is spread over data-parallel ranks are to be
gathered first, otherwise every rank has a baseline of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.interfaces import AdvantageConfig, Baseline

BASELINE: Baseline = "batch"


def compute(rewards: Tensor, valid: Tensor, group_index: Tensor, config: AdvantageConfig) -> Tensor:
    """``(r - mean) / (std + epsilon)`` over all valid samples of the batch, std with ddof 1.

    Args and result as in ``interfaces.AdvantageMethod``: [B] -> [B] fp32, 0 at masked samples.
    """
    del group_index  # the baseline is the batch's; the signature is that of every advantage
    known = torch.where(valid, rewards, 0.0).double()
    count = valid.sum()
    centred = torch.where(valid, known - known.sum() / count.clamp_min(1), 0.0)
    std = (centred.square().sum() / (count - 1).clamp_min(1)).sqrt()
    return (centred / (std + config.epsilon)).float()
