"""The experts of samples over pipeline stages: a stage knows those of its own layers, the journal those of all.

The trainer on a stage needs no others. But the journal is written by one rank, and read by any layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Completion, RolloutGroup


@dataclass(frozen=True)
class StagedRouting:
    """Between the layers of this stage and those of the model."""

    own: tuple[int, ...]
    """This stage's, counted from 0 over the model, in the order of `Completion.routing`."""
    layers: int
    """Of the model."""
    groups: ParallelGroups

    def whole(self, group: RolloutGroup) -> RolloutGroup:
        """With the experts of all layers; collective over the model copy, not over its stages: these are amid a burst,
        in which the last stage is ahead of the others.
        """

        def gathered(routing: torch.Tensor) -> torch.Tensor:
            every = routing.new_zeros(routing.shape[0], self.layers, routing.shape[2])
            if self.groups.tensor_group.rank() == 0:  # the others have the same
                every[:, list(self.own)] = routing
            dist.all_reduce(every.view(torch.uint8), group=self.groups.model_group)  # a byte is of one stage
            return every

        return _changed(group, gathered)

    def part(self, group: RolloutGroup) -> RolloutGroup:
        """With the experts of this stage's layers alone."""
        return _changed(group, lambda routing: routing[:, list(self.own)])


def _changed(group: RolloutGroup, change: Callable[[torch.Tensor], torch.Tensor]) -> RolloutGroup:
    if any(completion.routing is None for rollout in group.rollouts for completion in rollout.completions):
        return group

    def changed(completion: Completion) -> Completion:
        return replace(completion, routing=change(completion.routing))

    rollouts = []
    for rollout in group.rollouts:
        branches = tuple(replace(branch, completion=changed(branch.completion)) for branch in rollout.branches)
        rollouts.append(replace(rollout, completion=changed(rollout.completion), branches=branches))
    return replace(group, rollouts=tuple(rollouts))
