"""Graded groups made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.environments.results import is_right
from megatron_rl.types import (
    Branch,
    Completion,
    FinishReason,
    Grade,
    Hints,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
    SourcedTask,
    Task,
)

FAILED = Grade(None, code="timeout", message="10 s")


def told(grade: Grade, reward_range: tuple[float, float | None] = (-1.5, 1.0)) -> Grade:
    """The grade as the environment server sends it."""
    return grade if grade.failed else replace(grade, correct=is_right(replace(grade, correct=None), reward_range))


def graded_group(
    rewards: Sequence[float | None],
    prompt_ids: Sequence[int] = (1, 2),
    task_id: str = "t",
    environment: str = "toy",
    lengths: Sequence[int] | None = None,
    finish_reasons: Sequence[FinishReason] | None = None,
) -> RolloutGroup:
    """One rollout a reward; None is a failed grade. Sample i's answer is ``10 + i`` repeated."""
    lengths = lengths or [index + 1 for index in range(len(rewards))]
    finish_reasons = finish_reasons or ["stop"] * len(rewards)
    rollouts = []
    for index, (reward, length, reason) in enumerate(zip(rewards, lengths, finish_reasons, strict=True)):
        completion = Completion((10 + index,) * length, (-0.5 - index,) * length, reason, policy_version=0)
        grade = FAILED if reward is None else told(Grade(reward))
        rollouts.append(Rollout(completion, "text", grade))
    source = SourcedTask(environment, Task(task_id, "prompt"))
    return RolloutGroup(source, tuple(prompt_ids), tuple(rollouts))


def drawn(
    token_ids: Sequence[int], logprob: float = -1.0, finish_reason: FinishReason = "stop", **further: object
) -> Completion:
    """An answer whose tokens all have the same log-prob."""
    return Completion(tuple(token_ids), (logprob,) * len(token_ids), finish_reason, policy_version=0, **further)


def sample_of(reward: float | None, *sequences: tuple[Sequence[int], Completion]) -> Rollout:
    """A harness's sample of (prompt, completion) each."""
    (prompt, first), *others = sequences
    grade = FAILED if reward is None else told(Grade(reward))
    branches = tuple(Branch(tuple(ids), completion) for ids, completion in others)
    return Rollout(first, "text", grade, tuple(prompt), branches)


def group_of(*rollouts: Rollout, prompt_ids: Sequence[int] = (9,), task_id: str = "t") -> RolloutGroup:
    """``prompt_ids`` are the task's, which a harness need not use."""
    return RolloutGroup(SourcedTask("toy", Task(task_id, "prompt")), tuple(prompt_ids), rollouts)


def with_routing(group: RolloutGroup, layers: Sequence[int]) -> RolloutGroup:
    """Each sample with random experts of ``layers`` of four, in two bytes, the same whichever of them are asked for."""
    draw, rollouts = torch.Generator().manual_seed(5), []
    for rollout in group.rollouts:
        tokens = len(group.prompt_ids) + len(rollout.completion.token_ids)
        routing = torch.randint(0, 2048, (tokens, 4, 3), generator=draw).short()[:, list(layers)]
        rollouts.append(replace(rollout, completion=replace(rollout.completion, routing=routing)))
    return replace(group, rollouts=tuple(rollouts))


def request_of(group: RolloutGroup, index: int) -> Request:
    """The request that ``group`` answers, with experts if it has them."""
    wants = group.rollouts[0].completion.routing is not None
    return Request(
        group.source, group.prompt_ids, len(group.rollouts), SamplingParams(), index, hints=Hints(wants_routing=wants)
    )
