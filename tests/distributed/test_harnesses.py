"""A harness says what the same task says turn by turn: token for token, on one rank and on several.

That its samples are judged amid their turns, by the policy, changes none of it.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from megatron_rl.environments.agents import client_of
from megatron_rl.loop import rl_step
from megatron_rl.platform.groups import ParallelGroups, shut_down
from megatron_rl.types import Grade, HarnessRun, Turn
from tests.distributed.programs import join, toy_config
from tests.distributed.test_conversations import TURNS, answer_to, steps_of
from tests.support.ranks import run_ranks
from tests.support.tiny import SHAPES
from tests.support.toy import toy_run

TALKS = {"rl_max_new_tokens": 6, "rl_decode_steps_per_sync": 2, "rl_eval_max_new_tokens": 40, "rl_turn_discount": 0.5}
"""An answer beside the sessions may have as many as one of an evaluation."""


class Judged:
    """`test_conversations.answer` as a harness that asks the model about the same letters after each first turn."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[str, str]] = []
        """Prompt and answer, in the order of the steps."""

    async def run_all(self, environment: str, runs: Sequence[HarnessRun]) -> list[Grade]:
        """The samples of a group beside each other, each with a client of its own."""
        return list(await asyncio.gather(*(converse(run, self) for run in runs)))

    async def judge(self, client: openai.AsyncOpenAI, sample: int) -> None:
        """Greedy, outside of the session."""
        own, prompt = client.with_options(base_url=re.sub("/sessions/[^/]+", "", str(client.base_url))), "abcd"[sample:]
        said = await own.completions.create(model="policy", prompt=prompt, temperature=0, max_tokens=4)
        self.verdicts.append((prompt, said.choices[0].text))


async def converse(run: HarnessRun, judged: Judged) -> Grade:
    """The turns of a sample."""
    await give_up(run)
    async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0) as client:
        prompt, earned = run.task.prompt, {}
        for number in range(TURNS):
            answer = await client.completions.create(model="policy", prompt=prompt)
            said = answer.choices[0]
            prompt += said.text
            result = answer_to(run.task, number, Turn(said.text, said.finish_reason, 0, number=number))
            earned[answer.id] = result.turn_reward
            if result.continuation is None or number == TURNS - 1:
                return Grade(result.reward, completion_rewards=earned)
            prompt += result.continuation.messages[0]["content"]
            if number == 0:
                await judged.judge(client, run.sample)


async def give_up(run: HarnessRun) -> None:
    """A call beside the session whose client hangs up."""
    base_url = run.base_url.replace(urlsplit(run.base_url).path, "/v1")
    async with openai.AsyncOpenAI(base_url=base_url, api_key=run.api_key, max_retries=0) as judge:
        await (await judge.completions.create(model="policy", prompt=run.task.prompt, stream=True)).close()


def run_harnesses(tensor_size: int, stages: int = 1, **changes: Any) -> dict[str, Any]:
    """Two steps of training: what was said in them, and the metrics; as `test_conversations.talk`."""
    groups, judged = join(tensor_size, stages, **changes), Judged()
    run = toy_run(toy_config(groups, {**TALKS, **changes}), groups, run_harness=judged.run_all)
    return steps_of(run, groups) | {"verdicts": judged.verdicts}


@pytest.fixture(scope="module")
def turn_by_turn() -> dict[str, Any]:
    return run_ranks("tests.distributed.test_conversations:talk", 1, tensor_size=1)[0]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(1, {"tensor_size": 1}, marks=pytest.mark.long),
        pytest.param(2, {"tensor_size": 1}, marks=pytest.mark.long),
        pytest.param(2, {"tensor_size": 2}, marks=pytest.mark.long),
        (2, {"tensor_size": 1, "stages": 2}),
    ],
    ids=["one rank", "data", "tensor", "pipeline"],
)
def test_a_harness_says_what_the_turns_say(turn_by_turn: dict[str, Any], ranks: int, sizes: dict[str, int]) -> None:
    """Without ``--long``: replicas in tests/e2e/test_harnesses.py, and two that share experts below."""
    _assert_the_same(run_ranks("tests.distributed.test_harnesses:run_harnesses", ranks, **sizes), turn_by_turn)


def test_ranks_that_share_experts_wait_for_each_others_harnesses() -> None:
    experts = SHAPES["experts"]
    alone = run_ranks("tests.distributed.test_conversations:talk", 1, tensor_size=1, **experts)[0]
    sizes = experts | {"expert_model_parallel_size": 2}
    _assert_the_same(run_ranks("tests.distributed.test_harnesses:run_harnesses", 2, tensor_size=1, **sizes), alone)


@pytest.mark.long
def test_replicas_agree_on_the_harnesses_that_count() -> None:
    """Dynamic sampling: two replicas take the groups that one takes turn by turn, and give up the same others."""
    flags = {
        "rl_dynamic_sampling": True, "grpo_prompts_per_step": 2, "rl_oversampling": 4, "rl_group_filter": "mean_reward",
        "rl_group_filter_args": ("low=1.6", "high=1.9"),
    }  # fmt: skip
    (alone,) = run_ranks("tests.distributed.test_conversations:talk", 1, tensor_size=1, **flags)
    reports = run_ranks("tests.distributed.test_harnesses:run_harnesses", 2, tensor_size=1, **flags)
    _assert_the_same_steps(reports, alone)
    for report in reports:
        for own, expected in zip(report["steps"], alone["steps"], strict=True):
            for name in ("training/refills", "training/groups_started", "training/groups_answered"):
                assert own["metrics"][name] == expected["metrics"][name], name
    assert any(step["metrics"]["training/refills"] > 0 for step in alone["steps"])
    assert any(step["metrics"]["training/counting_share"] < 1 for step in alone["steps"])


def _assert_the_same(reports: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    _assert_the_same_steps(reports, expected)
    _assert_judged_by_the_policy(reports)


def _assert_the_same_steps(reports: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    for report in reports:
        for own, alone in zip(report["steps"], expected["steps"], strict=True):
            assert own["said"] == alone["said"]
            assert own["metrics"]["training/rollout_logprob_gap_max"] < 1e-5
            for name in ("actor/pg_loss", "critic/rewards/mean", "rollout/turns_mean"):
                assert own["metrics"][name] == pytest.approx(alone["metrics"][name], rel=0, abs=1e-5), name


def _assert_judged_by_the_policy(reports: Sequence[dict[str, Any]]) -> None:
    """As it is at each of the two steps."""
    said: dict[str, set[str]] = {}
    for report in reports:
        for prompt, answer in report["verdicts"]:
            said.setdefault(prompt, set()).add(answer)
    assert len(said) == 4
    assert all(len(answers) <= 2 for answers in said.values()), said
    assert any(len(answers) == 2 for answers in said.values()), said


async def run_oddly(environment: str, runs: Sequence[HarnessRun]) -> list[Grade]:
    """Of each group the first sample has no answer of the model, and the others have two sequences."""
    return [Grade(1.0), *await asyncio.gather(*map(branch, runs[1:]))]


async def branch(run: HarnessRun) -> Grade:
    """Two answers to the prompt at once, of which one goes on."""
    async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0) as client:
        calls = (client.completions.create(model="policy", prompt=run.task.prompt) for _ in range(2))
        said = sorted(answer.choices[0].text for answer in await asyncio.gather(*calls))
        last = await client.completions.create(model="policy", prompt=f"{run.task.prompt}{said[0]}yes")
        return Grade(sum(letter <= "m" for letter in last.choices[0].text) / 6)


def step_oddly(tensor_size: int, stages: int = 1, **changes: Any) -> dict[str, float]:
    """The metrics of a step."""
    groups = join(tensor_size, stages, **changes)
    return _stepped(groups, {**TALKS, "rl_max_failed_share": 0.6, **changes}, run_oddly)


def _stepped(groups: ParallelGroups, changes: dict[str, Any], harness: Any) -> dict[str, float]:
    run = toy_run(toy_config(groups, changes), groups, run_harness=harness)
    metrics = rl_step(run, 1).metrics
    run.closing.close()
    shut_down()
    return metrics


@functools.cache
def oddly_alone() -> dict[str, float]:
    return run_ranks("tests.distributed.test_harnesses:step_oddly", 1, tensor_size=1, **SHAPES["experts"])[0]


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_size": 1},
        {"tensor_size": 1, "stages": 2, "rl_router_replay": True},
        pytest.param(
            {"tensor_size": 2, "sequence_parallel": True, "rl_router_replay": True}, marks=pytest.mark.long
        ),
    ],
    ids=["data", "replay, pipeline", "replay, tensor"],
)
def test_branches_and_samples_without_calls_on_two_ranks(sizes: dict[str, Any]) -> None:
    """With --rl-router-replay the experts of every sequence are those that its tokens were sent to."""
    alone = oddly_alone()
    for report in run_ranks("tests.distributed.test_harnesses:step_oddly", 2, **sizes, **SHAPES["experts"]):
        assert report["training/rollout_logprob_gap_max"] < 1e-5
        assert report["training/failed_grades/no_calls"] == alone["training/failed_grades/no_calls"] > 0
        assert report["rollout/sequences_mean"] == alone["rollout/sequences_mean"] > 1
        for name in ("actor/pg_loss", "critic/rewards/mean", "perf/generated_tokens"):
            assert report[name] == pytest.approx(alone[name], rel=0, abs=1e-5), name


async def run_agents(environment: str, runs: Sequence[HarnessRun]) -> list[Grade]:
    """An asker and, in all but the first sample of a group, two calls of a helper, all at once."""
    return list(await asyncio.gather(*map(ask_and_help, runs)))


async def ask_and_help(run: HarnessRun) -> Grade:
    """Each agent is rewarded for its own letters."""
    async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0) as client:
        asker, helper = client_of(client, "asker"), client_of(client, "helper")
        prompts = [(asker, run.task.prompt), *[(helper, f"{run.task.prompt}{end}") for end in ("y", "n") if run.sample]]
        calls = (agent.completions.create(model="policy", prompt=prompt) for agent, prompt in prompts)
        first, *others = [
            sum(letter <= "m" for letter in answer.choices[0].text) / 6 for answer in await asyncio.gather(*calls)
        ]
        return Grade(first, agent_rewards={"asker": first, "helper": sum(others)})


def step_agents(tensor_size: int, stages: int = 1) -> dict[str, float]:
    """The metrics of a step."""
    changes = {"rl_max_new_tokens": 6, "rl_loss_aggregation": "sequence-mean"}
    return _stepped(join(tensor_size, stages), changes, run_agents)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_size": 1},
        pytest.param({"tensor_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_size": 1, "stages": 2}, marks=pytest.mark.long),
    ],
    ids=["data", "tensor", "pipeline"],
)
def test_agents_on_two_ranks(sizes: dict[str, Any]) -> None:
    """All ranks know the agents' rewards and groups: the advantages, and so the update, are those of one rank."""
    program = "tests.distributed.test_harnesses:step_agents"
    (alone,) = run_ranks(program, 1, tensor_size=1)
    assert alone["critic/advantages/max"] > 0.1 and alone["actor/grad_norm"] > 0
    assert "training/failed_grades/invalid_reward" not in alone
    names = ("actor/pg_loss", "actor/grad_norm", "critic/rewards/mean", "training/groups_with_signal")
    reports = run_ranks(program, 2, **sizes)
    for report in reports:
        for name in (*names, *(name for name in alone if "advantages/" in name)):
            assert report[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name
    for name in ("grade/toy/reward_asker", "grade/toy/reward_helper"):
        assert reports[0][name] == pytest.approx(alone[name]), name
