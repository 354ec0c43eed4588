"""Rows of `StepRewards` for samples with several agents: one per agent and sample.

Two samples of a task; in the second one only the planner acted, so the worker of the first is alone in its group::

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
    """Maps agents of samples to rows."""

    index: Mapping[tuple[int, int], int]
    """(sample, index of the agent's first sequence in it) -> row."""
    task: Tensor
    """[groups] int64: the task of each group, from 0; a group is one agent's rows of one task."""

    @classmethod
    def of(cls, tasks: Tensor, agents: Tensor, firsts: Tensor) -> tuple[Sequence[int], Tensor, AgentRows | None]:
        """Return the sample of each row, the group of each row, [N] int64, and the rows; None without several agents.

        Args:
            tasks: the task of each row, [N] int64, ascending.
            agents: the index of its agent in the task, [N] int64.
            firsts: the index of its agent's first sequence, [N] int64; 0 begins a new sample.
        """
        if not (agents.any() or firsts.any()):
            return range(len(tasks)), tasks, None
        samples = ((firsts == 0).cumsum(0) - 1).tolist()
        groups, group_index = torch.stack([tasks, agents], 1).unique(dim=0, return_inverse=True)
        index = {key: row for row, key in enumerate(zip(samples, firsts.tolist(), strict=True))}
        return samples, group_index, cls(index, groups[:, 0])

    def rows(self, samples: Sequence[int], firsts: Sequence[int]) -> list[int]:
        """Return the row of each sequence, without dummies (which have a first sequence, but no sample)."""
        return [self.index[key] for key in zip(samples, firsts, strict=False)]

    def by_task(self, informative: Tensor) -> Tensor:
        """Map [groups] bool to [tasks] bool: tasks with an ``informative`` group."""
        tasks = torch.zeros(int(self.task.max()) + 1, dtype=torch.bool)
        return tasks.index_fill(0, self.task[informative], True)
