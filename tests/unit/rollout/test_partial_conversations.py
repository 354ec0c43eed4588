"""Conversations that wait for the next step: whoever answers first, steps have the same groups, and none is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.inference.engine import Engine
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import ConversationSettings
from megatron_rl.rollout.journal import StepJournal
from megatron_rl.rollout.partial import PartialCollector, PartialRollouts, PartialStep, UnfinishedGroups
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, TaskPool
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.rollout.trace import divided, extended
from megatron_rl.signals import StopRequest
from megatron_rl.types import Completed, Completion, Continuation, Grade, Request, SamplingParams, Task, Turn
from tests.support.engines import QueuedEngine
from tests.support.toy import toy_tokenizer

A, B, X, END = 1, 2, 24, 0
STEPS, WANTED, AT_ONCE, LAG = 7, 2, 4, 3
TASKS = 32


def length(request: Request, sample: int) -> int:
    """Tokens of a turn, END included: the same whenever it is drawn."""
    return 2 + random.Random(f"{request.source.task.id}/{sample}/{request.place.turn}").randrange(6)


class OneTokenAStep(QueuedEngine):
    """Draws a token of every sample in a step; what is interrupted goes on."""

    def begin(self, seed: int, policy_version: int) -> None:
        super().begin(seed, policy_version)
        self.version = policy_version
        self._drawn: dict[int, list[Completion]] = {}

    def submit(self, request: Request) -> None:
        super().submit(request)
        nothing = Completion((), (), None, self.version)
        self._drawn[id(request)] = list(request.so_far or (nothing,) * request.num_samples)

    def step(self) -> list[Completed]:
        done = []
        for request in list(self._waiting):
            drawn = self._drawn[id(request)]
            for place, sample in enumerate(drawn):
                if sample.finish_reason is None:
                    drawn[place] = self._longer(sample, length(request, request.place.first_sample + place))
            if all(sample.finish_reason for sample in drawn):
                self._waiting.remove(request)
                done.append((request, tuple(drawn)))
        return done

    def _longer(self, sample: Completion, wanted: int) -> Completion:
        count = len(sample.token_ids)
        older = sample.older
        if count and sample.policy_version != self.version:
            older += ((sample.policy_version, count),)
        ids = (*sample.token_ids, END if count + 1 == wanted else A)
        reason = "stop" if count + 1 == wanted else None
        return Completion(ids, (*sample.inference_logprobs, -1.0 - count), reason,
                          self.version, older=older)  # fmt: skip

    def interrupt(self) -> list[Request]:
        left = [replace(request, so_far=tuple(self._drawn[id(request)])) for request in reversed(self._waiting)]
        self._waiting.clear()
        return left


class Run:
    """Steps of a collector; ``delays`` are what the environment waits before its answers."""

    def __init__(self, groups: ParallelGroups, delays: Sequence[float]) -> None:
        self._delays, self._answered = delays, 0
        pool = TaskPool("talk", [Task(str(number), "ab") for number in range(TASKS)], 1.0)
        self.source = PromptSource([pool], lambda *_: (A, B), 8, seed=1)
        settings = ConversationSettings({"talk": 4}, 60)
        engine: Engine = OneTokenAStep()
        self.rollouter = Rollouter(engine, toy_tokenizer(), groups, self._answer, StopRequest(), 0.0, settings)
        self.unfinished = UnfinishedGroups()
        self.collector = PartialCollector(
            source=self.source, factory=RequestFactory(SamplingParams(max_new_tokens=10), 60),
            rollouter=self.rollouter, groups=groups, expected_lengths=ExpectedLengths(), prompts_per_step=WANTED,
            group_size=2, max_failed_share=0.0,
            partial=PartialRollouts(AT_ONCE, LAG, finishes=True, in_rounds=True), unfinished=self.unfinished,
        )  # fmt: skip

    async def _answer(self, environment: str, items: Sequence[tuple[Task, Any, Turn]]) -> list[Grade]:
        self._answered += 1
        await asyncio.sleep(self._delays[self._answered % len(self._delays)])
        return [self._to(*item) for item in items]

    def _to(self, task: Task, state: Any, turn: Turn) -> Grade:
        assert (state or 0) == turn.number, "the state of another turn"
        turns = 1 + random.Random(f"{task.id}/{turn.num_tokens}").randrange(4)
        if turn.number + 1 >= turns:
            return Grade(float(turn.number), turn_reward=0.5)
        reply = ({"role": "user", "content": "x"},)
        return Grade(0.0, continuation=Continuation(reply, turn.number + 1), turn_reward=0.5)

    def step(self, version: int) -> PartialStep:
        step = self.collector.collect(version, version, StepJournal({}))
        assert step is not None
        self.collector.commit(step)
        return step


def saved(run: Run) -> dict[str, Any]:
    parts = (run.source, run.unfinished, run.collector.expected_lengths)
    return json.loads(json.dumps([part.state_dict() for part in parts]))


@pytest.fixture
def runs(one_rank: ParallelGroups):
    made: list[Run] = []

    def make(*delays: float) -> Run:
        made.append(Run(one_rank, delays))
        return made[-1]

    yield make
    for run in made:
        run.rollouter.close()


def test_no_clock_decides_and_no_prompt_is_lost(runs) -> None:
    at_once, late = runs(0.0), runs(0.004, 0.0, 0.0, 0.002, 0.0)
    trained, drawn, waited = [], 0, 0
    for version in range(STEPS):
        step, other = at_once.step(version), late.step(version)
        assert step.answered == other.answered
        assert step.unfinished == other.unfinished
        trained += [source.task.id for source in step.drawn]
        drawn += step.started
        waited += sum("talks" in record for record in step.unfinished)
        waiting = [record["asked"][1] for record in step.unfinished]
        # Every prompt that was drawn is trained on once, or waits; nothing is in two places.
        assert len(step.drawn) == WANTED
        assert sorted(trained + waiting) == sorted(set(trained + waiting))
        assert len(trained) + len(waiting) == drawn
    assert waited > 3, "no conversation waited behind its first turn"


def test_what_waited_is_said_as_if_it_had_not(runs) -> None:
    """Tokens, replies and rewards; and each token is of the weights of its step."""
    run = runs(0.0)
    rollouts = [rollout for version in range(STEPS) for group in run.step(version).answered.values()
                for rollout in group.rollouts]  # fmt: skip
    mixed = [rollout for rollout in rollouts if rollout.completion.older]
    assert any(rollout.completion.num_turns > 1 for rollout in mixed)
    for rollout in rollouts:
        completion = rollout.completion
        edges = [0, *(edge for span in completion.environment_spans for edge in span), len(completion.token_ids)]
        turns = [completion.token_ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        assert all(turn[-1] == END and set(turn[:-1]) <= {A} for turn in turns)
        assert [completion.token_ids[a:b] for a, b in completion.environment_spans] == [(X,)] * (len(turns) - 1)
        assert rollout.grade.reward == len(turns) - 1 + 0.5 * len(turns)
        assert completion.turn_rewards == (*[0.5] * (len(turns) - 1), len(turns) - 0.5)
        assert completion.finish_reason == "stop"
        versions = [version for version, _ in completion.stretches]
        assert versions == sorted(set(versions))
        assert sum(count for _, count in completion.stretches) == len(completion.token_ids)
        assert versions[-1] - versions[0] <= LAG


def test_a_killed_run_goes_on_from_its_checkpoint(runs) -> None:
    whole, first, resumed = runs(0.0), runs(0.0), runs(0.001, 0.0)
    for version in range(3):
        whole.step(version), first.step(version)
    for part, state in zip((resumed.source, resumed.unfinished, resumed.collector.expected_lengths), saved(first),
                           strict=True):  # fmt: skip
        part.load_state_dict(state)
    assert any("talks" in record for record in first.unfinished.state_dict()["groups"])
    for version in range(3, STEPS):
        assert resumed.step(version).answered == whole.step(version).answered
    assert saved(resumed) == saved(whole)


def test_versions_of_a_turn_that_was_begun_by_hand() -> None:
    """Turn one is of versions 2 and 3, the reply ``X X``, the next turn begun at 3 and gone on with at 5."""
    said = Completion((A, B, END), (-1.0, -2.0, -3.0), "stop", 3, older=((2, 1),))
    begun = Completion((A, A, B), (-4.0, -5.0, -6.0), None, 5, older=((3, 2),))
    whole = extended(said, (X, X), begun)
    assert whole.token_ids == (A, B, END, X, X, A, A, B)
    assert whole.older == ((2, 1), (3, 7))
    assert whole.stretches == ((2, 1), (3, 6), (5, 1))
    before, reply, turn = divided(whole)
    assert (before.token_ids, before.older, before.policy_version) == (said.token_ids, ((2, 1),), 3)
    assert (reply, turn) == ((X, X), begun)
    nothing = replace(begun, token_ids=(), inference_logprobs=(), older=())
    assert extended(said, (X,), nothing).stretches == ((2, 1), (3, 2), (5, 1))
    assert divided(extended(said, (X,), nothing))[2].token_ids == ()
