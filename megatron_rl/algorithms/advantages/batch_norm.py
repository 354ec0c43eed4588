"""Reward normalised by the mean and standard deviation of the whole batch (REINFORCE++, arXiv 2501.03262).

The batch is what the caller passes: rewards of a step that is spread over data-parallel ranks are to be
gathered first, otherwise every rank has a baseline of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.groups import group_statistics
from megatron_rl.algorithms.interfaces import AdvantageConfig


def compute(rewards: Tensor, valid: Tensor, group_index: Tensor, config: AdvantageConfig) -> Tensor:
    """``(r - mean) / (std + epsilon)`` over all usable samples of the batch, std with ddof 1.

    Usable samples are the same as for the group advantages: valid, in a group with two valid samples or more.
    Args and result as in ``interfaces.AdvantageFunction``: [B] -> [B] fp32, 0 at unusable samples.
    """
    usable = group_statistics(rewards, valid, group_index).usable
    known = torch.where(usable, rewards, 0.0).double()
    count = usable.sum()
    centred = torch.where(usable, known - known.sum() / count.clamp_min(1), 0.0)
    std = (centred.square().sum() / (count - 1).clamp_min(1)).sqrt()
    return (centred / (std + config.epsilon)).float()
