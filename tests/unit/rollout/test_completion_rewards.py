"""Rewards that a harness gives to single completions."""

from __future__ import annotations

import openai

from megatron_rl.types import Grade, HarnessRun
from tests.unit.rollout.test_harnesses import Stage, ask, stage  # noqa: F401 - a fixture


async def rewarded(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
    first = await client.completions.create(model="policy", prompt="ab")
    second = await client.completions.create(model="policy", prompt="abcx")
    await ask(client, "k")
    return Grade(0.25, completion_rewards={second.id: 2.0, first.id: 1.0})


def test_rewards_of_single_completions(stage: Stage) -> None:  # noqa: F811
    """What was given at the end is in the last turn of each sequence."""
    (rollout,) = stage.run(rewarded).groups[0].rollouts
    assert rollout.completion.turn_rewards == (1.0, 2.25)
    assert [branch.completion.turn_rewards for branch in rollout.branches] == [(0.25,)]
    assert (rollout.grade.reward, rollout.grade.completion_rewards) == (3.25, {})


def test_a_reward_of_no_completion_masks_the_sample(stage: Stage) -> None:  # noqa: F811
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        answer = await client.completions.create(model="policy", prompt="ab", n=1 + run.sample)
        return Grade(1.0, completion_rewards={answer.id if run.sample else "cmpl-of-another": 1.0})

    grades = [rollout.grade for rollout in stage.run(play, samples=2).groups[0].rollouts]
    assert [grade.code for grade in grades] == ["invalid_reward"] * 2
    assert "'cmpl-of-another' is no completion of this sample" in grades[0].message
    assert "has 2 choices" in grades[1].message
