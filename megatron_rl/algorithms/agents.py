"""Rows of `StepRewards` where samples have several agents: a row is what one agent did in one sample.

Two samples of a task; in the second one only the planner acted, so the worker has no other to be compared with::

    row       0 planner   1 worker   2 planner
    sample    0           0          1
    group     0           1          0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AgentRows:
    """Where the agents of samples have their rows."""

    index: Mapping[tuple[int, int], int]
    """By sample, and the number of the agent's first sequence in it."""
    task: Tensor
    """[groups] int64: the task of each group, from 0; a group is one agent's rows of one task."""

    @classmethod
    def of(cls, tasks: Tensor, agents: Tensor, firsts: Tensor) -> tuple[Sequence[int], Tensor, AgentRows | None]:
        """Return the sample of each row, the group of each row, [N] int64, and the rows; None without several agents.

        Args:
            tasks: the task of each row, [N] int64, ascending.
            agents: the number of its agent among those of the task, [N] int64.
            firsts: the number of its agent's first sequence, [N] int64; 0 begins another sample.
        """
        if not (agents.any() or firsts.any()):
            return range(len(tasks)), tasks, None
        samples = ((firsts == 0).cumsum(0) - 1).tolist()
        groups, group_index = torch.stack([tasks, agents], 1).unique(dim=0, return_inverse=True)
        index = {key: row for row, key in enumerate(zip(samples, firsts.tolist(), strict=True))}
        return samples, group_index, cls(index, groups[:, 0])

    def rows(self, samples: Sequence[int], firsts: Sequence[int]) -> list[int]:
        """Return the row of each sequence; of dummies there is a first sequence, but no sample."""
        return [self.index[key] for key in zip(samples, firsts, strict=False)]

    def by_task(self, informative: Tensor) -> Tensor:
        """Return which tasks have a group that is ``informative``: [groups] bool -> [tasks] bool."""
        tasks = torch.zeros(int(self.task.max()) + 1, dtype=torch.bool)
        return tasks.index_fill(0, self.task[informative], True)
