"""Several agents in one sample of a harness: addresses, rewards, sequences and records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from megatron_rl.environments.agents import client_of
from megatron_rl.environments.judging import SESSION
from megatron_rl.environments.results import checked_grade, result_from_json, result_to_json
from megatron_rl.metrics.rollouts import rows_by_group
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import from_row, to_row
from megatron_rl.rollout.journal import RolloutJournal
from megatron_rl.types import Grade, HarnessRun, Rollout
from tests.unit.rollout.test_harnesses import Stage, ask, ids, stage, two_turns  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("error")
BOTH = {"planner": 1.0, "worker": 0.25}


async def plan_and_work(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
    """The worker's prompt begins with what the planner read and wrote, but it is another conversation."""
    planner, worker = client_of(client, "planner"), client_of(client, "worker")
    plan = await ask(planner, "ab")
    await asyncio.gather(ask(worker, f"ab{plan}x"), ask(worker, "k"), ask(planner, f"ab{plan}s"))
    return Grade(0.5, agent_rewards=BOTH | {"critic": 7.0})


def sequences(rollout: Rollout) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    prompts = (rollout.prompt_ids, *(branch.prompt_ids for branch in rollout.branches))
    written = (completion.token_ids for completion in rollout.completions)
    return list(zip(rollout.agents, prompts, written, strict=True))


def test_agents_have_conversations_and_rewards_of_their_own(stage: Stage) -> None:  # noqa: F811
    """The critic did not act, so its reward is ignored."""
    (rollout,) = stage.run(plan_and_work).groups[0].rollouts
    found = sequences(rollout)
    assert found[0] == ("planner", ids("ab"), ids("c$st$"))
    assert [(agent, prompt) for agent, prompt, _ in found[1:]] == [("worker", ids("abcx")), ("worker", ids("k"))]
    assert rollout.grade == Grade(
        0.5, {"edited_histories": 0.0, "reward_planner": 1.0, "reward_worker": 0.25}, agent_rewards=BOTH
    )


def test_the_same_prompt_of_two_agents_is_drawn_twice(stage: Stage) -> None:  # noqa: F811
    """With random numbers that do not depend on who asks first; ``main`` has those of a sample without agents."""

    def play(first: str, second: str) -> Callable:
        async def ask_both(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
            for name in (first, second):
                await ask(client_of(client, name), "ab", stop="q" if name == "planner" else None)
            return Grade(0.0, agent_rewards={"planner": 1.0, "main": 0.0})

        return ask_both

    branches = []
    for order in (("planner", "main"), ("main", "planner")):
        (rollout,) = stage.run(play(*order)).groups[0].rollouts
        assert rollout.agents == ("main", "planner")
        branches.append({bool(r.sampling.stop): r.place.branch for r in stage.engine.requests[-2:]})
    assert branches[0] == branches[1]
    assert branches[0][False] == 0 != branches[0][True]


@pytest.mark.parametrize(
    ("agents", "rewards", "problem"),
    [
        (("planner", "worker"), {"planner": 1.0}, "no reward of 'worker', which called the model; it has ['planner']"),
        (("planner", "main"), {"planner": 1.0}, "no reward of 'main' (the client that run was given)"),
        (("main",), {"worker": 1.0}, "no reward of 'main'"),
        (("planner",), {}, "no reward of 'planner', which called the model; it has []"),
    ],
)
def test_an_agent_without_a_reward_masks_the_sample(
    stage: Stage, agents: tuple[str, ...], rewards: dict[str, float], problem: str  # noqa: F811
) -> None:
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        for number, name in enumerate(agents):
            await ask(client_of(client, name), "abcd"[number:])
        return Grade(1.0, agent_rewards=rewards)

    (rollout,) = stage.run(play).groups[0].rollouts
    assert (rollout.grade.reward, rollout.grade.code) == (None, "invalid_reward")
    assert problem in rollout.grade.message


def test_rewards_of_single_completions_are_of_their_agent(stage: Stage) -> None:  # noqa: F811
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        planner, worker = client_of(client, "planner"), client_of(client, "worker")
        first = await planner.completions.create(model="policy", prompt="ab")
        second = await worker.completions.create(model="policy", prompt="k")
        await ask(planner, "abcx")
        return Grade(0.5, agent_rewards=BOTH, completion_rewards={first.id: 2.0, second.id: 3.0})

    (rollout,) = stage.run(play).groups[0].rollouts
    assert [completion.turn_rewards for completion in rollout.completions] == [(2.0, 1.0), (3.25,)]
    assert (rollout.grade.reward, rollout.grade.agent_rewards) == (5.5, {"planner": 3.0, "worker": 3.25})
    assert rollout.grade.metrics["reward_worker"] == 3.25


def test_names_and_numbers_of_agents_are_checked(stage: Stage) -> None:  # noqa: F811
    problems: list[str] = []

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        for name in ("Planner", "a b", "x" * 33, "%2e%2e", *(f"agent{number}" for number in range(8))):
            url = f"{str(client.base_url).removesuffix('/v1/')}/agents/{name}/v1"
            try:
                await ask(client.with_options(base_url=url), "ab")
            except openai.BadRequestError as refused:
                problems.append(refused.body["message"])
        with pytest.raises(ValueError, match="'Planner' is no name of an agent"):
            client_of(client, "Planner")
        return Grade(1.0, agent_rewards={f"agent{number}": 1.0 for number in range(7)})

    (rollout,) = stage.run(play).groups[0].rollouts
    assert len(problems) == 5 and all("is no name of an agent" in problem for problem in problems[:4])
    assert problems[4] == "'agent7' is one agent too many: a sample has up to 8, main among them"
    assert len(rollout.agents) == 7


def test_calls_after_the_reward_are_refused_at_every_address(stage: Stage) -> None:  # noqa: F811
    urls = []

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        urls.append(client_of(client, "planner").base_url)
        assert client_of(client_of(client, "planner"), "main").base_url == client.base_url
        return await plan_and_work(run, client)

    assert stage.run(play).groups[0].is_graded
    with openai.OpenAI(base_url=urls[0], api_key=stage.endpoint.token, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(model="policy", prompt="ab")
    assert refused.value.status_code == 410
    assert SESSION.sub("/v1", str(urls[0])) == f"{stage.endpoint.url}/v1", "a judge's calls are of no agent"


def test_a_call_that_waits_at_the_end_gets_410_whichever_agent_asked(stage: Stage) -> None:  # noqa: F811
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        url, header = f"{client_of(client, 'planner').base_url}completions", {"Authorization": f"Bearer {run.api_key}"}
        waiting.append(threads.submit(httpx.post, url, json={"model": "policy", "prompt": "abz"}, headers=header))
        while not stage.engine.requests:
            await asyncio.sleep(0.01)
        await ask(client_of(client, "worker"), "ab")
        return Grade(1.0, agent_rewards={"worker": 1.0})

    waiting: list[Future[httpx.Response]] = []
    with ThreadPoolExecutor(1) as threads:
        (rollout,) = stage.run(play).groups[0].rollouts
        assert waiting[0].result(timeout=30).status_code == 410
    assert rollout.agents == ("worker",)


def test_agents_come_back_from_the_journal(
    stage: Stage, one_rank: ParallelGroups, tmp_path: Path  # noqa: F811
) -> None:
    """And a group without any is written without them."""
    journal = RolloutJournal(tmp_path, one_rank)
    results = []
    for _ in range(2):
        step = journal.open(1, {})
        results.append(stage.run(plan_and_work, samples=2, journal=step).groups[0])
        step.close()
    assert stage.attempts == 1
    assert results[0] == results[1]
    step = journal.open(2, {})
    stage.run(two_turns, journal=step)
    step.close()
    assert b"agent" not in (tmp_path / "step_0000002.rank_0.journal").read_bytes().replace(b'["agent", ', b"")


def test_records_name_the_agent(stage: Stage) -> None:  # noqa: F811
    [rows] = rows_by_group(1, stage.run(plan_and_work).groups, str)
    assert [(row["branch"], row["agent"], row["agent_reward"], row["reward"]) for row in rows] == [
        (0, "planner", 1.0, 0.5), (1, "worker", 0.25, 0.5), (2, "worker", 0.25, 0.5),
    ]  # fmt: skip
    [rows] = rows_by_group(1, stage.run(two_turns).groups, str)
    assert not [name for name in rows[0] if "agent" in name]


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ({"Planner": 1.0}, "'Planner' is no name of an agent"),
        ({"planner": float("nan")}, "'planner' is nan, no finite number"),
        ({"planner": "1"}, "'planner' is '1', no finite number"),
        ([1.0], "of type list, not a mapping"),
    ],
)
def test_agent_rewards_are_checked(rewards: object, problem: str) -> None:
    found = checked_grade(Grade(1.0, agent_rewards=rewards))
    assert found.code == "invalid_reward" and problem in found.message


def test_agent_rewards_travel() -> None:
    grade = checked_grade(Grade(1, agent_rewards={"planner": 2}))
    assert result_from_json(result_to_json(grade)) == grade
    assert from_row(to_row((3, grade))) == (3, grade)
    assert "agent_rewards" not in result_to_json(Grade(1.0))
