"""Statistics of the samples of a task's group, as advantages need them; no loop over samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import StepRewards
from megatron_rl.algorithms.extension import Baseline


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's group: ``[N]`` fp64. Masked samples count nowhere."""

    count: Tensor
    """Valid samples in the group."""
    mean: Tensor
    """Mean reward of the valid samples; 0 without any."""
    centred: Tensor
    """Reward minus the group's mean; 0 where masked, and where no other sample of the group is valid."""
    std: Tensor
    """Standard deviation over the group with ddof 1; 0 for fewer than two valid samples."""


def group_statistics(step: StepRewards) -> GroupStatistics:
    """Count, centred reward and standard deviation of each sample's group."""
    # fp64: in fp32 the mean of eight rewards of 0.1 is off by 7e-9, which an epsilon of 1e-6 would turn into
    # advantages of 0.007 for a group of equal rewards.
    known = torch.where(step.valid, step.rewards, 0.0).double()
    count = _group_sum(step.valid.double(), step.group_index)
    mean = _group_sum(known, step.group_index) / count.clamp_min(1)
    centred = torch.where(step.valid, known - mean, 0.0)
    variance = _group_sum(centred.square(), step.group_index) / (count - 1).clamp_min(1)
    return GroupStatistics(count, mean, centred, variance.sqrt())


def normalised(values: Tensor, times: Tensor, epsilon: float) -> Tensor:
    """Return ``(value - mean) / (std + epsilon)`` of ``values`` [N], [N] fp64; std with ddof 1.

    Sample n counts ``times[n]`` times in mean and std; where that is 0 so is the result, whatever the value.
    """
    counts, times = times > 0, times.double()
    known, count = torch.where(counts, values, 0.0).double(), times.sum()
    centred = torch.where(counts, known - (known * times).sum() / count, 0.0)
    std = ((centred.square() * times).sum() / (count - 1).clamp_min(1)).sqrt()
    return centred / (std + epsilon)


def _group_sum(values: Tensor, group_index: Tensor) -> Tensor:
    """Of each sample the sum over its group, [N]; there are no more groups than samples."""
    return torch.zeros_like(values).index_add_(0, group_index, values)[group_index]


def informative_groups(baseline: Baseline, rewards: Tensor, valid: Tensor, group_index: Tensor) -> Tensor:
    """Return which groups have an advantage that can differ from 0: [number of groups] bool.

    Against a baseline of the group, those with valid rewards that are not all equal. Against one of the batch, all
    with a valid reward, unless the whole batch's are equal: without the groups that were always solved the advantages
    would not add up to 0. With a critic or a teacher, all with a valid reward. The tensors are as in `StepRewards`.
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
