"""Samples of harnesses that go on in the next step of partial rollouts: real clients and endpoint, no model."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import openai
import pytest

from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.harnesses import HarnessSettings
from megatron_rl.rollout.journal import FinishedGroups
from megatron_rl.rollout.partial import PartialGoal, talk_of, waiting_record
from megatron_rl.rollout.past_calls import PastCalls, key_of
from megatron_rl.rollout.prompt_source import drawn_for
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.signals import StopRequest
from megatron_rl.types import Completion, Grade, HarnessRun, Place, Request, Rollout, SamplingParams, SourcedTask, Task
from tests.support import partial_steps
from tests.support.partial_steps import AT_ONCE, END, LAG, WANTED, A, B, OneTokenAStep, Run, X
from tests.support.toy import toy_tokenizer

STEPS = 6
Play = Callable[[HarnessRun, openai.AsyncOpenAI], Awaitable[Grade]]


class Steps(Run):
    """Steps of partial rollouts whose samples are those of a harness."""

    def __init__(self, groups: ParallelGroups, play: Play) -> None:
        super().__init__(groups, [0.0], by_clock=frozenset({"talk"}))
        self.endpoint = Endpoint(toy_tokenizer(), max_sequence_length=60, max_new_tokens=10)
        self.endpoint.start()
        self._play = play
        self.rollouter.close()
        self.rollouter = Rollouter(
            self.engine, toy_tokenizer(), groups, None, StopRequest(),
            harnesses=HarnessSettings({"talk"}, self._run_all, self.endpoint),
        )  # fmt: skip
        self.collector.rollouter = self.rollouter

    async def _run_all(self, _: str, runs: Sequence[HarnessRun]) -> list[Grade]:
        return await asyncio.gather(*map(self._run, runs))

    async def _run(self, run: HarnessRun) -> Grade:
        async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0) as client:
            return await self._play(run, client)

    def close(self) -> None:
        self.rollouter.close()
        self.endpoint.close()


@pytest.fixture
def steps(one_rank: ParallelGroups) -> Iterator[Callable[[Play], Steps]]:
    made: list[Steps] = []

    def make(play: Play) -> Steps:
        made.append(Steps(one_rank, play))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
    return (await client.completions.create(model="policy", prompt=prompt)).choices[0].text


def turns_of(task: str) -> int:
    return 1 + int(task) % 4


async def talks(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
    """Ask until there are as many turns as the task wants: each prompt is all that was said before, and an x."""
    said = run.task.prompt
    for turn in range(turns_of(run.task.id)):
        said += "x" * (turn > 0) + await ask(client, said + "x" * (turn > 0))
    return Grade(float(said.count("x")))


def test_every_prompt_is_trained_on_once_or_waits_and_all_answers_are_kept(steps: Callable[[Play], Steps]) -> None:
    run, trained, drawn = steps(talks), [], 0
    rollouts = []
    for version in range(STEPS):
        # What is saved is all that a later step needs.
        state = json.loads(json.dumps(run.unfinished.state_dict()))
        run.unfinished.load_state_dict(state)
        step = run.step(version)
        assert len(step.drawn) == WANTED
        trained += [source.task.id for source in step.drawn]
        drawn += step.started
        waiting = [record["asked"][1] for record in step.unfinished]
        assert len(trained + waiting) == len(set(trained + waiting)) == drawn
        rollouts += [(source, r) for source, group in zip(step.drawn, step.answered.values(), strict=True)
                     for r in group.rollouts]  # fmt: skip
    for source, rollout in rollouts:
        completion, turns = rollout.completion, turns_of(source.task.id)
        assert not rollout.branches, "a call that was made again is another sequence"
        assert rollout.grade.reward == turns - 1
        assert [completion.token_ids[a:b] for a, b in completion.environment_spans] == [(X,)] * (turns - 1)
        assert completion.token_ids.count(END) == turns
        assert set(completion.token_ids) <= {A, X, END}
        # Each token is of the weights of the step that drew it: older ones first, and none too old.
        versions = [version for version, _ in completion.stretches]
        assert versions == sorted(set(versions))
        assert versions[-1] - versions[0] <= LAG
        assert sum(count for _, count in completion.stretches) == len(completion.token_ids)


def test_what_was_drawn_is_not_drawn_again(steps: Callable[[Play], Steps]) -> None:
    """Every token that the engine ever drew is in a sample that was trained on, or waits."""
    run = steps(talks)
    drawn = 0
    longer = run.engine._longer

    def counted(sample: Completion, wanted: int) -> Completion:
        nonlocal drawn
        drawn += 1
        return longer(sample, wanted)

    run.engine._longer = counted
    kept = 0
    for version in range(STEPS):
        step = run.step(version)
        kept += sum(rollout.num_written for group in step.answered.values() for rollout in group.rollouts)
    waiting = run.unfinished.requests(run.source, run.collector.factory, 2)
    assert len(waiting) == AT_ONCE - WANTED
    # Those of samples that ended with branches none; of conversations that wait what the environment said is no token.
    in_sight = sum(each.num_written for request in waiting for each in drawn_for(request))
    assert drawn == kept + in_sight


def test_a_program_that_asks_something_else_gets_new_answers(steps: Callable[[Play], Steps]) -> None:
    starts = itertools.count()

    async def wanders(run: HarnessRun, client: openai.AsyncOpenAI) -> Grade:
        said = "abcdefgh"[next(starts) % 8] + await ask(client, "abcdefgh"[next(starts) % 8])
        for _ in range(turns_of(run.task.id)):
            said += "x" + await ask(client, said + "x")
        return Grade(1.0)

    run = steps(wanders)
    for version in range(STEPS):
        step = run.step(version)
        assert len(step.drawn) == WANTED
        for group in step.answered.values():
            assert all(not rollout.grade.failed for rollout in group.rollouts)


class StopsAmid(OneTokenAStep):
    """Draws in its first step two of the nine tokens of an answer, and the others in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_amid = asyncio.Event()

    def _longer(self, sample: Completion, wanted: int) -> Completion:
        if wanted == 9 and len(sample.token_ids) == 2 and self.version == 0:
            self.is_amid.set()
            return sample
        return super()._longer(sample, wanted)


def test_an_answer_that_was_begun_goes_on_and_a_sample_that_has_ended_is_not_started_again(
    one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group 0 ends when of group 1 sample 0 has ended, and sample 1 is amid its second turn."""
    engine, ended, started = StopsAmid(), asyncio.Event(), []
    lengths = {(1, 1): 9}
    monkeypatch.setattr(
        partial_steps, "length", lambda request, sample: lengths.get((sample, request.place.turn), 3)
    )  # fmt: skip

    async def play(_: str, runs: Sequence[HarnessRun]) -> list[Grade]:
        (run,) = runs
        started.append((run.task.id, run.sample))
        async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, max_retries=0) as client:
            said = await ask(client, "ab")
            if run.task.id == "long" and run.sample == 1:
                said += await ask(client, f"ab{said}x")
        if run.task.id == "short":
            await asyncio.gather(engine.is_amid.wait(), ended.wait())
        return [Grade(float(len(said)))]

    endpoint = Endpoint(toy_tokenizer(), max_sequence_length=60, max_new_tokens=10)
    endpoint.start()
    rollouter = Rollouter(
        engine, toy_tokenizer(), one_rank, None, StopRequest(), harnesses=HarnessSettings({"talk"}, play, endpoint)
    )
    keep = FinishedGroups.keep

    def kept(self: FinishedGroups, request: Request, sample: int, rollout: Rollout, is_new: bool = True) -> None:
        keep(self, request, sample, rollout, is_new)
        ended.set()  # the first is sample 0 of the long group: the others wait for it

    monkeypatch.setattr(FinishedGroups, "keep", kept)
    limits = SamplingParams(max_new_tokens=10)
    requests = [
        Request(SourcedTask("talk", Task(name, "ab")), (A, B), 2, limits, index)
        for index, name in enumerate(("short", "long"))
    ]
    try:
        goal = PartialGoal(requests, due=set(), others=1, in_rounds=True)
        assert rollouter.run(requests, 9, 0, None, goal).finished.keys() == {0}
        (waiting,) = goal.unfinished
        record = json.loads(json.dumps(waiting_record(waiting)))
        talks = tuple(talk_of(talk, wants_routing=False) for talk in record["talks"])
        assert (talks[1], talks[0].ended) == (waiting.talks[1], replace(waiting.talks[0].ended, text=""))
        assert sorted(answer.token_ids for answer in talks[1].calls.values()) == [(A, A), (A, A, END)]
        goal = PartialGoal([waiting], due=set(), others=1, in_rounds=True)
        group = rollouter.run([waiting], 9, 1, None, goal).finished[1]
    finally:
        rollouter.close()
        endpoint.close()
    assert sorted(started) == [("long", 0), ("long", 1), ("long", 1), ("short", 0), ("short", 1)]
    first, second = (rollout.completion for rollout in group.rollouts)
    assert first.token_ids == (A, A, END)
    assert second.token_ids == (A, A, END, X, *[A] * 8, END)
    assert second.stretches == ((0, 6), (1, 7))
    assert second.inference_logprobs[4:] == tuple(-1.0 - count for count in range(9))
    assert group.rollouts[1].grade.metrics["repeated_calls"] == 2.0


def call(number: int, prompt: tuple[int, ...], branch: int = 0, most: int = 4) -> Request:
    source = SourcedTask("talk", Task("1", "a"))
    return Request(source, prompt, 1, SamplingParams(max_new_tokens=most), place=Place(call=number, branch=branch))


def test_a_call_is_known_by_prompt_branch_and_limits() -> None:
    calls = [call(0, (1, 2)), call(0, (1, 2), branch=1), call(0, (1, 2), most=5), call(0, (1, 2, 3))]
    calls.append(replace(calls[0], sampling=replace(calls[0].sampling, stop=("x",))))
    assert len({key_of(each) for each in calls}) == len(calls)
    assert key_of(call(7, (1, 2))) == key_of(calls[0])


def test_what_is_kept_by_hand() -> None:
    answer, begun = Completion((5, 0), (-1.0, -1.0), "stop", 3), Completion((6,), (-1.0,), None, 3)
    past = PastCalls()
    assert past.add(call(0, (1,))) is None
    assert past.add(call(1, (2,))) is None
    assert past.add(call(2, (3,))) is None
    talk = past.waiting({0: answer, 1: begun, 2: Completion((), (), None, 3)})
    assert talk.calls == {key_of(call(9, (1,))): answer, key_of(call(9, (2,))): begun}
    again = PastCalls(talk.calls)
    assert (again.add(call(4, (2,))), again.add(call(5, (4,)))) == (begun, None)
    assert again.num_repeated == 1
    longer = Completion((6, 0), (-1.0, -1.0), "stop", 4, older=((3, 1),))
    assert again.waiting({4: longer}).calls == talk.calls | {key_of(call(9, (2,))): longer}
