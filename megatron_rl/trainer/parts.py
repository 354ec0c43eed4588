"""Training units: a whole sample, or the part of one of its agents.

A group of two samples; the agents' rewards are compared by column, and each part is a row of `StepRewards`::

               planner    worker
    sample 0     1.0        0.5
    sample 1     0.0         -          the worker did not act: no part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.environments.agents import MAIN
from megatron_rl.types import Branch, Rollout, RolloutGroup


@dataclass(frozen=True)
class Part:
    """A sample, or one agent's part of it."""

    rollout: Rollout
    reward: float | None
    """None if grading failed."""
    sequences: Sequence[Branch]
    first: int = 0
    """Index of the first of these sequences in the sample."""
    agent: int = 0
    """Index of the agent in the group."""

    @property
    def num_written(self) -> int:
        """Number of tokens that the model wrote in these sequences."""
        return sum(sequence.completion.num_written for sequence in self.sequences)

    @property
    def truncated(self) -> bool:
        """True if one of these sequences reached its length limit."""
        return any(sequence.completion.finish_reason == "length" for sequence in self.sequences)


def parts_of(group: RolloutGroup) -> list[Part]:
    """List the parts of a group's samples, in order and then by agent name; a failed sample is one part."""
    if not any(rollout.agents for rollout in group.rollouts):
        return [Part(r, r.grade.reward, group.sequences(r)) for r in group.rollouts]
    agents = sorted({name for r in group.rollouts if not r.grade.failed for name in _agents(r)})
    parts: list[Part] = []
    for rollout in group.rollouts:
        sequences, own = group.sequences(rollout), _agents(rollout)
        if rollout.grade.failed:
            parts.append(Part(rollout, None, sequences))
            continue
        for name in sorted(set(own)):
            first, count = own.index(name), own.count(name)
            reward = rollout.grade.agent_rewards.get(name, rollout.grade.reward)
            parts.append(Part(rollout, reward, sequences[first : first + count], first, agents.index(name)))
    return parts


def _agents(rollout: Rollout) -> Sequence[str]:
    """Return the agent of each sequence; ``main`` for samples without agent names in groups that have them."""
    return rollout.agents or (MAIN,) * len(rollout.completions)
