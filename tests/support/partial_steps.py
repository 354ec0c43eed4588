"""Steps of partial rollouts with an engine without a model: every sample has a length that its task decides."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.inference.engine import Engine
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import ConversationSettings
from megatron_rl.rollout.filtering import DynamicSampling
from megatron_rl.rollout.journal import StepJournal
from megatron_rl.rollout.partial import PartialCollector, PartialRollouts, PartialStep, UnfinishedGroups
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, TaskPool
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.signals import StopRequest
from megatron_rl.types import Completed, Completion, Continuation, Grade, Item, Request, SamplingParams, Task, Turn
from tests.support.engines import QueuedEngine
from tests.support.toy import toy_tokenizer

A, B, X, END = 1, 2, 24, 0
WANTED, AT_ONCE, LAG = 2, 4, 3
TASKS = 64


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
        assert not request.is_generated, "nothing is left to draw"
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

    def cancel(self, calls: Collection[int]) -> None:
        self._waiting = [request for request in self._waiting if request.place.call not in calls]

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        return []

    def interrupt(self) -> list[Request]:
        left = [replace(request, so_far=tuple(self._drawn[id(request)])) for request in reversed(self._waiting)]
        self._waiting.clear()
        return left


class ReadsLate(OneTokenAStep):
    """Has drawn a token of every sample that `step` has not told of, like an engine that plans while it draws."""

    def interrupt(self) -> list[Request]:
        complete = [replace(request, so_far=completions) for request, completions in self.step()]
        self.completed_by_stopping += sum(request.place.turn > 0 for request in complete)
        return complete + super().interrupt()

    completed_by_stopping = 0
    """Turns after the first."""


class Run:
    """Steps of a collector; ``delays`` are what the environment waits before its answers.

    A conversation is worth the number of its turns before the last; with ``turns`` 1, an answer is worth 1 if its
    length is odd.
    """

    def __init__(
        self, groups: ParallelGroups, delays: Sequence[float], turns: int = 4, dynamic: DynamicSampling | None = None,
        engine: Engine | None = None, **settings: object,
    ) -> None:  # fmt: skip
        self._delays, self._turns, self.judged = delays, turns, 0
        pool = TaskPool("talk", [Task(str(number), "ab") for number in range(TASKS)], 1.0)
        self.source = PromptSource([pool], lambda *_: (A, B), 8, seed=1)
        self.engine: Engine = engine or OneTokenAStep()
        conversations = ConversationSettings({"talk": turns}, 60)
        self.rollouter = Rollouter(
            self.engine, toy_tokenizer(), groups, self._answer, StopRequest(), 0.0, conversations
        )
        partial = PartialRollouts(AT_ONCE, LAG, finishes=True, in_rounds=turns > 1)
        self.unfinished = UnfinishedGroups()
        self.collector = PartialCollector(
            source=self.source, factory=RequestFactory(SamplingParams(max_new_tokens=10), 60),
            rollouter=self.rollouter, groups=groups, expected_lengths=ExpectedLengths(), prompts_per_step=WANTED,
            group_size=2, max_failed_share=0.0, dynamic=dynamic,
            partial=replace(partial, **settings), unfinished=self.unfinished,
        )  # fmt: skip

    async def _answer(self, environment: str, items: Sequence[Item]) -> list[Grade]:
        self.judged += 1
        await asyncio.sleep(self._delays[self.judged % len(self._delays)])
        return [self._to(*item) if self._turns > 1 else Grade(float(item[1].num_tokens % 2)) for item in items]

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


def resume(run: Run, state: list[Any]) -> None:
    """Go on from what `saved` returned."""
    parts = (run.source, run.unfinished, run.collector.expected_lengths)
    for part, value in zip(parts, state, strict=True):
        part.load_state_dict(value)
