"""Group statistics for advantages, vectorised over samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import StepRewards
from megatron_rl.algorithms.extension import Baseline


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's group: ``[N]`` fp64. Masked samples are excluded."""

    count: Tensor
    """Valid samples in the group."""
    mean: Tensor
    """Mean reward of the valid samples; 0 without any."""
    centred: Tensor
    """Reward minus the group's mean; 0 if masked, or alone among valid samples."""
    std: Tensor
    """Standard deviation in the group with ddof 1; 0 for fewer than two valid samples."""


def group_statistics(step: StepRewards) -> GroupStatistics:
    """Compute the statistics of each sample's group."""
    # fp64: the fp32 mean of eight rewards of 0.1 is off by 7e-9, and an epsilon of 1e-6 would make advantages of 0.007
    # from equal rewards.
    known = torch.where(step.valid, step.rewards, 0.0).double()
    count = _group_sum(step.valid.double(), step.group_index)
    mean = _group_sum(known, step.group_index) / count.clamp_min(1)
    centred = torch.where(step.valid, known - mean, 0.0)
    variance = _group_sum(centred.square(), step.group_index) / (count - 1).clamp_min(1)
    return GroupStatistics(count, mean, centred, variance.sqrt())


def normalised(values: Tensor, times: Tensor, epsilon: float) -> Tensor:
    """Return ``(value - mean) / (std + epsilon)`` of ``values`` [N], [N] fp64; std with ddof 1.

    Sample n counts ``times[n]`` times in mean and std; if 0, its result is 0.
    """
    counts, times = times > 0, times.double()
    known, count = torch.where(counts, values, 0.0).double(), times.sum()
    centred = torch.where(counts, known - (known * times).sum() / count, 0.0)
    std = ((centred.square() * times).sum() / (count - 1).clamp_min(1)).sqrt()
    return centred / (std + epsilon)


def _group_sum(values: Tensor, group_index: Tensor) -> Tensor:
    """Sum over each sample's group, [N]."""
    return torch.zeros_like(values).index_add_(0, group_index, values)[group_index]


def informative_groups(baseline: Baseline, rewards: Tensor, valid: Tensor, group_index: Tensor) -> Tensor:
    """Return which groups can have a nonzero advantage: [number of groups] bool.

    Baseline "group": groups whose valid rewards differ. "batch": all groups with a valid reward, unless all rewards of
    the batch are equal (without always-solved groups advantages would not sum to 0). Critic or teacher: all groups with
    a valid reward. Tensors as in `StepRewards`.
    """
    num_groups = int(group_index.max()) + 1 if group_index.numel() else 0
    if baseline != "group":
        known = rewards[valid]
        differ = baseline != "batch" or (known.numel() > 0 and bool(known.max() > known.min()))
        return torch.zeros(num_groups, dtype=torch.bool).index_fill(0, group_index[valid], differ)
    lowest, highest = rewards.new_full((2, num_groups), torch.inf)
    lowest.scatter_reduce_(0, group_index, rewards.masked_fill(~valid, torch.inf), "amin")
    highest.neg_().scatter_reduce_(0, group_index, rewards.masked_fill(~valid, -torch.inf), "amax")
    return highest > lowest
