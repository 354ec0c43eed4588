"""Which groups of a step pass the filter of dynamic sampling, and what the metrics say of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.extension import measure_of
from megatron_rl.platform.collectives import gather_vectors
from megatron_rl.trainer.parts import parts_of
from megatron_rl.types import Grade, RolloutGroup


@dataclass(frozen=True)
class DynamicSampling:
    """Settings of dynamic sampling: which groups count, and how often more are sampled."""

    counts: Callable[[Tensor], bool]
    """A `GroupFilter`."""
    max_refills: int
    """Most rounds of a step after its first."""


def counts_in(counts: Callable[[Tensor], bool], group: RolloutGroup) -> bool:
    """Return whether a group passes the `GroupFilter` ``counts``: by its rewards, or its verdicts if all have one.

    Of samples of several agents the rewards of one agent must pass.
    """
    verdicts = [grade.correct for grade in _grades(group)]
    if measure_of(counts) == "rewards" or None in verdicts:
        return any(map(counts, _rewards_by_agent(group)))
    return counts(torch.tensor(verdicts, dtype=torch.float32))


def graded_rewards(group: RolloutGroup) -> Tensor:
    """Return the rewards of those samples that have a grade."""
    return torch.tensor([grade.reward for grade in _grades(group)])


def rewards_of_all(answered: Iterable[RolloutGroup], replicas: dist.ProcessGroup, any_counts: bool) -> dict[str, float]:
    """Return metrics of all rewards, also of groups that do not count; collective over the ``replicas``."""
    rewards = torch.cat(gather_vectors(torch.cat([torch.zeros(0), *map(graded_rewards, answered)]), replicas))
    if not rewards.numel():
        return {}
    mean, low, high = rewards.mean().item(), rewards.min().item(), rewards.max().item()
    metrics = {"rollout/score/mean": mean}
    if not any_counts:  # so that the log can say why: what is trained on has none
        metrics |= {"critic/rewards/mean": mean, "critic/rewards/min": low, "critic/rewards/max": high}
    return metrics


def _rewards_by_agent(group: RolloutGroup) -> list[Tensor]:
    parts = parts_of(group)
    graded = [part for part in parts if part.reward is not None]
    return [torch.tensor([part.reward for part in graded if part.agent == agent]) for agent in {p.agent for p in parts}]


def _grades(group: RolloutGroup) -> list[Grade]:
    return [rollout.grade for rollout in group.rollouts if not rollout.grade.failed]
