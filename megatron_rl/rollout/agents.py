"""The rewards of a sample of several agents, see `environments.agents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_rl.endpoint.sessions import SessionEnd
from megatron_rl.environments.agents import MAIN
from megatron_rl.types import Grade


def calls_of(grade: Grade, end: SessionEnd) -> Mapping[str, Sequence[int]]:
    """Return the answered calls by agent; all by an empty name where neither calls nor rewards name an agent."""
    return end.agents or {MAIN if grade.agent_rewards else "": end.calls}


def judged(grade: Grade, calls: Mapping[str, Sequence[int]]) -> Grade:
    """Return the grade with rewards of the agents that acted, or the failure that one of them has none.

    A reward of an agent that made no call is ignored: harnesses reward all roles, and not each acts in each sample. A
    name that is misspelled is found all the same, as the agent that did act lacks its reward.
    """
    missing = [name for name in calls if name not in grade.agent_rewards]
    if grade.failed:
        return grade
    if missing:
        own = " (the client that run was given)" if missing[0] == MAIN else ""
        has = f"it has {sorted(grade.agent_rewards)}"
        message = f"agent_rewards has no reward of {missing[0]!r}{own}, which called the model; {has}"
        return Grade(None, code="invalid_reward", message=message)
    return replace(grade, agent_rewards={name: grade.agent_rewards[name] for name in calls})


def with_metrics(grade: Grade) -> Grade:
    """Return the grade with the reward of each agent among its metrics."""
    rewards = {f"reward_{name}": reward for name, reward in grade.agent_rewards.items()}
    return replace(grade, metrics={**grade.metrics, **rewards})
