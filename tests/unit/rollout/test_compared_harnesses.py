"""Harnesses whose samples are compared, by the stage of `test_harnesses`."""

from __future__ import annotations

from collections.abc import Sequence

import openai

from megatron_rl.types import Grade, HarnessRun, Task, Transcript
from tests.unit.rollout.test_harnesses import Stage, ask, ids, two_turns
from tests.unit.rollout.test_harnesses import stage as stage


def test_samples_of_a_group_are_compared_by_all_that_was_said(stage: Stage) -> None:
    """A reward of a single call, one at the end and one by comparison; a sample that failed has no part in it."""
    asked: list[tuple[Task, Sequence[Transcript]]] = []

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        answer = await client.completions.create(model="policy", prompt=run.task.prompt)
        if run.sample == 1:
            return Grade(None, code="environment_exception")
        said = answer.choices[0].text
        if run.sample == 2:
            await ask(client, f"{run.task.prompt}{said}x")
            await ask(client, "de")
        return Grade(0.5, {"own": 1.0}, completion_rewards={answer.id: 0.25})

    async def compare(task: Task, transcripts: Sequence[Transcript]) -> list[Grade]:
        asked.append((task, transcripts))
        return [Grade(float(len(each.text)), {"place": 1.0}) for each in transcripts]

    (group,) = stage.run(play, samples=3, compare=compare).groups
    (task, transcripts), = asked
    assert (task.id, [(each.text, each.num_tokens) for each in transcripts]) == ("0", [("c", 2), ("cxy\n\nf", 6)])
    assert [rollout.grade.reward for rollout in group.rollouts] == [0.75 + 1, None, 0.75 + 6]
    assert group.rollouts[0].completion.turn_rewards == (0.25 + 0.5 + 1,)
    assert group.rollouts[2].completion.turn_rewards == (0.25, 0.5 + 6)
    assert group.rollouts[0].grade.metrics == {"own": 1.0, "place": 1.0, "run_reward": 0.75, "edited_histories": 0.0}


def test_a_comparison_that_fails_masks_its_samples(stage: Stage) -> None:
    async def compare(task: Task, transcripts: Sequence[Transcript]) -> list[Grade]:
        return [Grade(None, code="timeout") for _ in transcripts]

    (group,) = stage.run(two_turns, samples=2, compare=compare).groups
    assert [rollout.grade.code for rollout in group.rollouts] == ["timeout", "timeout"]
    assert [rollout.completion.token_ids for rollout in group.rollouts] == [ids("c$xy$")] * 2
