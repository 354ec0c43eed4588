"""Statistics of the samples of a task's group, as advantages need them; no loop over samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import StepRewards
from megatron_rl.algorithms.extension import Baseline


@dataclass(frozen=True)
class GroupStatistics:
    """What each sample sees of its group: ``[N]`` fp64. Masked samples count nowhere."""

    count: Tensor
    """Valid samples in the group."""
    centred: Tensor
    """Reward minus the group's mean; 0 where masked, and where no other sample of the group is valid."""
    std: Tensor
    """Standard deviation over the group with ddof 1; 0 for fewer than two valid samples."""


def group_statistics(step: StepRewards) -> GroupStatistics:
    """Count, mean and standard deviation of each sample's group."""
    # fp64: in fp32 the mean of eight rewards of 0.1 is off by 7e-9, which an epsilon of 1e-6 would turn into
    # advantages of 0.007 for a group that has no signal.
    group_index, num_groups = step.group_index, _num_groups(step.group_index)
    known = torch.where(step.valid, step.rewards, 0.0).double()
    count = _group_sum(step.valid.double(), group_index, num_groups)
    mean = _group_sum(known, group_index, num_groups) / count.clamp_min(1)

    centred = torch.where(step.valid, known - mean[group_index], 0.0)
    variance = _group_sum(centred.square(), group_index, num_groups) / (count - 1).clamp_min(1)
    return GroupStatistics(count[group_index], centred, variance.sqrt()[group_index])


def groups_with_signal(baseline: Baseline, rewards: Tensor, valid: Tensor, group_index: Tensor) -> Tensor:
    """Which groups have an advantage that can differ from 0.

    Against a baseline of the group, those with valid rewards that are not all equal. Against one of the batch, all
    with a valid reward, unless the whole batch's are equal: left out, a group that was always solved would take its
    positive advantages with it, and those that stay would not add up to 0.

    Args:
        baseline: what the advantage compares a reward with.
        rewards: [N] fp32, finite where ``valid``.
        valid: [N] bool.
        group_index: [N] int64, counted from 0.

    Returns:
        [number of groups] bool; with a baseline of the group False where fewer than two samples are valid.
    """
    num_groups = _num_groups(group_index)
    if baseline == "batch":
        known = rewards[valid]
        differ = known.numel() > 0 and bool(known.max() > known.min())
        return _group_sum(valid.double(), group_index, num_groups) > (0 if differ else torch.inf)
    lowest, highest = rewards.new_full((2, num_groups), torch.inf)
    lowest.scatter_reduce_(0, group_index, rewards.masked_fill(~valid, torch.inf), "amin")
    highest.neg_().scatter_reduce_(0, group_index, rewards.masked_fill(~valid, -torch.inf), "amax")
    return highest > lowest


def _num_groups(group_index: Tensor) -> int:
    return int(group_index.max()) + 1 if group_index.numel() else 0


def _group_sum(values: Tensor, group_index: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add_(0, group_index, values)
