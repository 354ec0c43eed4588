"""Harnesses with real clients and the real endpoint, and an engine that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import GroupGradeFunction
from megatron_rl.rollout.harnesses import HarnessSettings
from megatron_rl.rollout.journal import RolloutJournal, StepJournal
from megatron_rl.rollout.rollouter import Rollouter, RolloutResult
from megatron_rl.signals import StopRequest
from megatron_rl.types import Completion, Grade, HarnessRun, Request, SamplingParams, SourcedTask, Task
from tests.support.engines import QueuedEngine
from tests.support.toy import LETTERS, toy_tokenizer
from tests.unit.rollout.test_rollouter import EndsAt

Play = Callable[[HarnessRun, openai.AsyncOpenAI], Awaitable[Grade]]


class Engine(QueuedEngine):
    """Answers a prompt with its last letter's successors, by branch; of one that ends in ``z`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[int] = []

    def ends(self, request: Request) -> bool:
        return LETTERS[request.prompt_ids[-1]] != "z"

    def cancel(self, calls: Collection[int]) -> None:
        self.cancelled += calls
        self._waiting = [request for request in self._waiting if request.place.call not in calls]

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        return [(request, ids("pq")) for request in filter(wanted, self._waiting)]

    def answer(self, request: Request) -> tuple[Completion, ...]:
        ids = (request.prompt_ids[-1] + 1 + request.place.branch % 2**16, 0)  # above it is the agent
        return (Completion(ids, (-1.0, -2.0), "stop", policy_version=4),)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(LETTERS.index, text))


class Stage:
    """A rollouter over `Engine`, an endpoint, and harnesses that run on its loop."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self.endpoint = Endpoint(toy_tokenizer(), max_sequence_length=40, max_new_tokens=8)
        self.endpoint.start()
        self.engine, self.stop = Engine(), StopRequest()
        self.attempts = 0
        self.before_rewards: Callable[[HarnessRun], None] = lambda run: None
        """Called for the first sample between its end and the closing of its session; nothing else runs meanwhile."""

    async def run_all(self, play: Play, runs: Sequence[HarnessRun]) -> list[Grade]:
        self.attempts += 1
        grades = await asyncio.gather(*(self._run(play, run) for run in runs))
        self.before_rewards(runs[0])
        return grades

    async def _run(self, play: Play, run: HarnessRun) -> Grade:
        async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0) as client:
            return await play(run, client)

    def run(
        self,
        play: Play,
        samples: int = 1,
        masks_edits: bool = False,
        journal: StepJournal | None = None,
        tasks: Sequence[str] = ("ab",),
        quota: EndsAt | None = None,
        compare: GroupGradeFunction | None = None,
    ) -> RolloutResult | None:
        async def run_all(_: str, runs: Sequence[HarnessRun]) -> list[Grade]:
            return await self.run_all(play, runs)

        by_group = {} if compare is None else {"agent": compare}
        settings = HarnessSettings({"agent"}, run_all, self.endpoint, masks_edits, by_group)
        rollouter = Rollouter(self.engine, toy_tokenizer(), self._groups, None, self.stop, harnesses=settings)
        try:
            sampling = SamplingParams(max_new_tokens=6)
            requests = [
                Request(SourcedTask("agent", Task(f"{index}", text)), ids(text), samples, sampling, index)
                for index, text in enumerate(tasks)
            ]
            return rollouter.run(requests, 9, 4, journal, quota)
        finally:
            rollouter.close()


@pytest.fixture
def stage(one_rank: ParallelGroups) -> Iterator[Stage]:
    stage = Stage(one_rank)
    yield stage
    stage.endpoint.close()


async def ask(client: openai.AsyncOpenAI, prompt: str, **more: object) -> str:
    return (await client.completions.create(model="policy", prompt=prompt, **more)).choices[0].text


async def two_turns(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
    said = await ask(client, run.task.prompt)
    return Grade(float(await ask(client, f"{run.task.prompt}{said}x") == "y"), {"calls": 2.0})


def test_a_sample_of_two_calls(stage: Stage) -> None:
    result = stage.run(two_turns, samples=3)
    (group,) = result.groups
    for rollout in group.rollouts:
        assert (rollout.prompt_ids, rollout.branches) == (ids("ab"), ())
        assert rollout.completion.token_ids == ids("c$xy$")
        assert rollout.completion.inference_logprobs == (-1, -2, 0, -1, -2)
        assert rollout.completion.environment_spans == ((2, 3),)
        assert rollout.grade == Grade(1.0, {"calls": 2.0, "edited_histories": 0.0})
        assert rollout.text == "cxy"
    assert sorted((r.place.first_sample, r.place.turn, r.place.branch) for r in stage.engine.requests) == [
        (sample, turn, 0) for sample in range(3) for turn in range(2)
    ]


def test_choices_and_later_calls_are_branches(stage: Stage) -> None:
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        answer = await client.completions.create(model="policy", prompt="ab", n=2)
        assert [choice.text for choice in answer.choices] == ["c", "d"]
        await ask(client, "abdx")
        await ask(client, "k")
        return Grade(0.5)

    (rollout,) = stage.run(play).groups[0].rollouts
    assert (rollout.prompt_ids, rollout.completion.token_ids) == (ids("ab"), ids("d$xy$"))
    assert [(b.prompt_ids, b.completion.token_ids) for b in rollout.branches] == [
        (ids("ab"), ids("c$")), (ids("k"), ids("l$"))
    ]  # fmt: skip


async def edits(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
    messages = [{"role": "user", "content": "ab"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        assert answer.choices[0].message.content == "c" if len(messages) == 1 else "y"
        messages += [{"role": "assistant", "content": "q"}, {"role": "user", "content": "x"}]
    return Grade(1.0)


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat is its contents one after the other."""
    from tests.support.toy import _Letters

    def render(self: object, messages: Sequence[dict], **_: object) -> str:
        return "".join(message["content"] for message in messages)

    monkeypatch.setattr(_Letters, "apply_chat_template", render, raising=False)


@pytest.mark.usefixtures("chats")
def test_edited_histories_are_split_or_masked(stage: Stage) -> None:
    (rollout,) = stage.run(edits).groups[0].rollouts
    assert rollout.grade == Grade(1.0, {"edited_histories": 1.0})
    assert (rollout.prompt_ids, rollout.completion.token_ids) == (ids("abqx"), ids("y$"))
    assert [(b.prompt_ids, b.completion.token_ids) for b in rollout.branches] == [(ids("ab"), ids("c$"))]
    (masked,) = stage.run(edits, masks_edits=True).groups[0].rollouts
    assert (masked.grade.reward, masked.grade.code) == (None, "edited_history")
    assert masked.grade.message.startswith("1 calls with answers")


def test_what_fails_is_masked_and_the_others_are_as_without(stage: Stage) -> None:
    """One without a call, one that dies, one whose last call nobody waits for: its answer would never come."""

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        if run.sample == 1:
            return Grade(1.0)
        if run.sample == 2:
            await ask(client, "ab")
            return Grade(None, code="worker_died", message="signal 9")
        if run.sample == 3:
            await ask(client, "ab")
            with pytest.raises(openai.APITimeoutError):
                await ask(client, "abcz", timeout=0.2)
            return Grade(None, code="timeout", message="too long")
        return await two_turns(run, client)

    rollouts = stage.run(play, samples=5).groups[0].rollouts
    assert [r.grade.code for r in rollouts] == ["", "no_calls", "worker_died", "timeout", ""]
    assert [r.completion.token_ids for r in rollouts] == [
        ids("c$xy$"), (), ids("c$"), ids("c$"), ids("c$xy$")
    ]  # fmt: skip
    assert not rollouts[1].truncated, "who never spoke was not cut"
    assert stage.engine.cancelled == [r.place.call for r in stage.engine.requests if r.prompt_ids == ids("abc$z")]


def test_a_stream_is_shown_while_it_is_drawn_and_left_amid_it(stage: Stage) -> None:
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        await ask(client, "ab")
        async with await client.completions.create(model="policy", prompt="abcz", stream=True) as stream:
            shown.append((await anext(stream)).choices[0].text)
        while not stage.engine.cancelled:
            await asyncio.sleep(0.01)
        await ask(client, "abcx")
        return Grade(1.0)

    shown: list[str] = []
    (rollout,) = stage.run(play).groups[0].rollouts
    assert shown == ["pq"]
    assert (rollout.completion.token_ids, rollout.branches) == (ids("c$xy$"), ())
    assert stage.engine.cancelled == [r.place.call for r in stage.engine.requests if r.prompt_ids == ids("abc$z")]


def test_the_caller_s_limits_hold_beside_the_run_s(stage: Stage) -> None:
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        await ask(client, "ab", max_tokens=3, stop="q", temperature=0.5)
        await ask(client, "abcx", max_tokens=50)
        return Grade(1.0)

    stage.run(play)
    drawn = [(r.sampling.max_new_tokens, r.sampling.stop, r.sampling.temperature) for r in stage.engine.requests]
    assert drawn == [(3, ("q",), 1.0), (6, (), 1.0)]


def test_a_call_that_comes_with_the_reward_is_left(stage: Stage) -> None:
    """It was put before its session closed, and is taken after."""

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        await ask(client, "ab")
        return Grade(1.0)

    def call_late(run: HarnessRun) -> None:
        body, header = {"model": "policy", "prompt": "abcx"}, {"Authorization": f"Bearer {run.api_key}"}
        post = partial(httpx.post, f"{run.base_url}/completions", json=body, headers=header, timeout=60)
        late.append(threads.submit(post))
        stage.endpoint.wait_blocking(30)  # the rollouter, on the same thread, takes nothing meanwhile

    stage.before_rewards = call_late
    late: list[Future[httpx.Response]] = []
    with ThreadPoolExecutor(1) as threads:
        (rollout,) = stage.run(play).groups[0].rollouts
    assert late[0].result().status_code == 410
    assert rollout.completion.token_ids == ids("c$")
    assert len(stage.engine.requests) == 1


def test_a_server_that_died_costs_one_more_run(stage: Stage) -> None:
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        grade = await two_turns(run, client)
        return Grade(None, code="server_unreachable") if run.sample == 1 and stage.attempts < 2 else grade

    rollouts = stage.run(play, samples=2).groups[0].rollouts
    assert [rollout.completion.token_ids for rollout in rollouts] == [ids("c$xy$")] * 2
    assert rollouts[1].grade.reward == 1.0
    assert stage.attempts == 2


def test_a_server_that_stays_away(stage: Stage) -> None:
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        return Grade(None, code="server_unreachable", message="gone")

    (rollout,) = stage.run(play).groups[0].rollouts
    assert (rollout.grade.code, stage.attempts) == ("server_unreachable", 2)


def test_calls_after_the_reward_are_refused(stage: Stage) -> None:
    urls = []

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        urls.append(run.base_url)
        return await two_turns(run, client)

    assert stage.run(play).groups[0].is_graded
    client = openai.OpenAI(base_url=urls[0], api_key=stage.endpoint.token, max_retries=0)
    with client, pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="policy", prompt="ab")
    assert refused.value.status_code == 410


def test_a_stop_ends_harnesses_that_wait(stage: Stage) -> None:
    ends: list[str] = []

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        stage.stop.reason = "SIGTERM"
        try:
            await ask(client, "abz")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return Grade(1.0)

    assert stage.run(play, samples=2) is None
    assert ends == ["cancelled"] * 2


def test_a_quota_ends_harnesses_that_are_not_needed(stage: Stage) -> None:
    ends: list[str] = []

    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        try:
            await ask(client, run.task.prompt)
        except asyncio.CancelledError:
            ends.append(run.task.prompt)
            raise
        return Grade(1.0)

    result = stage.run(play, tasks=("az", "ab"), quota=EndsAt(1))
    assert list(result.finished) == [1]
    assert ends == ["az"]
    assert not stage.engine.has_unfinished
    assert stage.run(play, tasks=("cd",)).groups[0].rollouts[0].completion.token_ids == ids("e$"), "and then the next"


def test_a_judge_asks_beside_the_session(stage: Stage) -> None:
    async def play(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        said = await ask(client, "ab")
        async with openai.AsyncOpenAI(base_url=stage.endpoint.base_url(), api_key=run.api_key) as judge:
            verdict = await ask(judge, f"k{said}", temperature=0, max_tokens=3)
        return Grade(float(verdict == "d"))

    (rollout,) = stage.run(play).groups[0].rollouts
    assert (rollout.grade.reward, rollout.completion.token_ids, rollout.branches) == (1.0, ids("c$"), ())
    aside = stage.engine.requests[-1]
    assert (aside.sampling.greedy, aside.sampling.max_new_tokens, aside.prompt_ids) == (True, 3, ids("kc"))


def test_a_finished_group_comes_back_and_a_failed_one_runs_again(stage: Stage, tmp_path: Path) -> None:
    async def fails(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        await two_turns(run, client)
        return Grade(None, code="timeout", message="10 s")

    journal = RolloutJournal(tmp_path, stage._groups)
    for play, attempts in ((fails, 1), (two_turns, 2), (two_turns, 2)):
        step = journal.open(1, {})
        result = stage.run(play, journal=step)
        step.close()
        assert stage.attempts == attempts
    assert result.groups[0].rollouts[0].completion.token_ids == ids("c$xy$")
    assert result.groups[0].rollouts[0].prompt_ids == ids("ab")
