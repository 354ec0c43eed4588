"""Generate groups and grade them, or answer their turns, while the rest still generates."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
import uvloop

from megatron_rl.inference.engine import Engine, EngineStatistics
from megatron_rl.platform.collectives import any_rank, max_over
from megatron_rl.platform.device import OutOfMemoryOnAllRanks, is_out_of_memory, reason_of
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import Conversations, ConversationSettings, GradeFunction
from megatron_rl.rollout.journal import FinishedGroups, StepJournal
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completed, Request, RolloutGroup

if TYPE_CHECKING:  # with an HTTP server, which a run without harnesses does not need
    from megatron_rl.rollout.harnesses import Harnesses, HarnessSettings

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.005
_WAIT_SECONDS = 0.2
"""Longest wait for an environment when nothing generates: a request to stop must be noticed."""
_EXCHANGE_EVERY = 8
"""Engine steps between two exchanges of ranks that step together: of a request to stop, and of grades where no
environment replies. Each lets pipeline stages wait for each other, which costs a pass of a lane."""


class Goal:
    """The goal of a rollout, and so its end. This one: all its requests."""

    in_rounds = False
    """Samples may have several turns: groups are taken as they end. No engine step is made while an environment's reply
    is due, so that no clock decides what is generated first. Harnesses are not waited for: they may take minutes."""
    was_left = False
    """Another replica has left, as it was asked to stop or ran out of memory; all must."""

    def take(self, done: Sequence[Completed], engine: Engine) -> Sequence[Completed]:
        """Return those of the generated requests that are to be graded; it may interrupt the ``engine``."""
        return done

    def settle(self, finished: FinishedGroups, pause: Callable[[], list[Request]]) -> None:
        """Look at the groups that have ended; of rounds, called when no reply is due.

        ``pause`` ends all work, and returns what is to go on in the next step.
        """

    def is_met(self, finished: Mapping[int, RolloutGroup], idle: bool) -> bool:
        """Return whether the rollout ends; ``idle`` says that nothing is left to generate or to grade here.

        ``finished`` are this replica's groups. Collective among the ranks that step together.
        """
        return idle

    def leave(self) -> None:
        """Let this replica generate no more, whatever the others need."""


@dataclass(frozen=True)
class RolloutResult:
    """The result of one call of `Rollouter.run`."""

    finished: dict[int, RolloutGroup]
    """By the index of their request, in the order of the requests; fewer than these where the goal was met before."""
    statistics: EngineStatistics
    generate_seconds: float
    grade_wait_seconds: float
    """How long grading held the run up after the last token."""

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """Ordered like the requests."""
        return tuple(self.finished.values())


class Rollouter:
    """Owns the event loop in which generation and grading overlap."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        groups: ParallelGroups,
        grade: GradeFunction,
        stop: StopRequest,
        grace_seconds: float = 0.0,
        conversations: ConversationSettings | None = None,
        harnesses: HarnessSettings | None = None,
    ) -> None:
        """After a request to stop, a rollout goes on for ``grace_seconds`` before it is cancelled.

        Without ``conversations`` every environment has single answers, without ``harnesses`` none calls the model.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._groups = groups
        self._grade = grade
        self._stop = stop
        self._grace_seconds = grace_seconds
        self._conversations = conversations or ConversationSettings({}, max_sequence_length=0)
        self._harnesses = harnesses
        replies = harnesses is not None or any(turns > 1 for turns in self._conversations.max_turns.values())
        self._heeds_answers_at_once = replies or groups.model_group.size() == 1
        """An answer may be a turn to generate, or concerns this rank alone."""
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(
        self,
        requests: Sequence[Request],
        seed: int,
        policy_version: int,
        journal: StepJournal | None = None,
        goal: Goal | None = None,
    ) -> RolloutResult | None:
        """Complete and grade ``requests`` until the ``goal`` is met, by default all of them; collective over the job.

        Groups that the ``journal`` knows are taken from it, the others are written to it as they are finished. None on
        every rank of the job when one of them was asked to stop.

        Raises:
            OutOfMemoryOnAllRanks: a rank that steps alone ran out of memory.
        """
        self._engine.begin(seed, policy_version)
        goal, result, shortage = goal or Goal(), None, ""
        try:
            # Not ``Runner.run``: with Python's own SIGINT handler it formats the whole result into an error message
            # that nobody sees, 5 ms for 128 short answers and seconds for a batch of long ones.
            result = self._runner.get_loop().run_until_complete(self._run(requests, journal, goal))
        except (RuntimeError, MemoryError) as error:
            # Those that step together wait inside the engine; ranks that step alone have met nobody yet.
            if not is_out_of_memory(error) or self._groups.lockstep_group.size() > 1:
                raise
            traceback.clear_frames(error.__traceback__)
            shortage = reason_of(error) or "no memory"
        if result is None:
            goal.leave()
        ends = max_over({"stopped": result is None, "out of memory": bool(shortage)}, dist.group.WORLD)
        if ends["out of memory"]:
            raise OutOfMemoryOnAllRanks(shortage or "on another rank")
        return None if ends["stopped"] else result

    def close(self) -> None:
        """Stop the event loop."""
        self._runner.close()

    async def _run(self, requests: Sequence[Request], journal: StepJournal | None, goal: Goal) -> RolloutResult | None:
        finished, started = FinishedGroups(self._tokenizer, journal or StepJournal({})), time.perf_counter()
        conversations = Conversations(
            self._grade, self._conversations, self._tokenizer, self._groups, finished, goal.in_rounds
        )
        harnesses = None
        if self._harnesses is not None:
            from megatron_rl.rollout.harnesses import Harnesses

            harnesses = Harnesses(self._harnesses, self._groups, finished, one_by_one=goal.in_rounds)
        samples = _Samples(self._engine, goal, conversations, harnesses, finished)
        try:
            samples.begin(requests)
            generated = await self._generate(samples, finished.groups, len(requests))
        finally:
            await samples.cancel()
        self._engine.abort()
        if generated is None or goal.was_left:
            return None
        groups = {r.index: finished.groups[r.index] for r in requests if r.index in finished.groups}
        return RolloutResult(groups, self._engine.statistics, generated - started, time.perf_counter() - generated)

    async def _generate(
        self, samples: _Samples, finished: Mapping[int, RolloutGroup], num_requests: int
    ) -> float | None:
        """Generate until the goal is met; returns when the last token was drawn, None when asked to stop."""
        generated = time.perf_counter()
        for steps in itertools.count():
            # Once all groups are finished, nobody waits for what the engine may still have of them.
            generating = self._engine.has_unfinished and len(finished) < num_requests
            generating &= not samples.holds_back
            generating, waiting = self._on_any_copy(generating, samples.waiting)
            idle = not (generating or waiting)
            if samples.goal.is_met(finished, idle):
                return generated
            if generating:
                samples.step()
                generated = time.perf_counter()
            else:
                await samples.wait(_WAIT_SECONDS)
            if not generating or self._heeds_answers_at_once or steps % _EXCHANGE_EVERY == 0:
                samples.submit_turns()
            if self._must_stop(steps + 1):
                return None
            # Let the connections to the environment server move; where other replicas still generate, let them.
            await asyncio.sleep(_LOOK_AGAIN_SECONDS if idle else 0)

    def _on_any_copy(self, *facts: bool) -> tuple[bool, ...]:
        """Return which facts hold for any model copy that shares experts; the ranks of one copy know the same."""
        groups = self._groups
        if groups.lockstep_group.size() == groups.model_group.size():
            return facts
        agreed = max_over({str(number): fact for number, fact in enumerate(facts)}, groups.lockstep_group)
        return tuple(map(bool, agreed.values()))

    def _must_stop(self, steps: int) -> bool:
        """Ranks that step together must also stop together."""
        due = self._stop.requested and self._stop.seconds >= self._grace_seconds
        if self._groups.lockstep_group.size() == 1:
            return due
        return steps % _EXCHANGE_EVERY == 0 and any_rank(due, self._groups.lockstep_group)


@dataclass
class _Samples:
    """The samples of one rollout, between the engine and their environments."""

    engine: Engine
    goal: Goal
    conversations: Conversations
    harnesses: Harnesses | None
    finished: FinishedGroups

    def __post_init__(self) -> None:
        self._parts = [self.conversations] if self.harnesses is None else [self.conversations, self.harnesses]

    def begin(self, requests: Sequence[Request]) -> None:
        """Submit what no earlier start has answered."""
        harnesses, conversations = self.harnesses, self.conversations
        calling = {r.index for r in requests if harnesses is not None and harnesses.leads(r)}
        new = [r for r in requests if not conversations.take_up(r, of_harness=r.index in calling)]
        if len(new) < len(requests):
            logger.info("%d of %d groups were answered before", len(requests) - len(new), len(requests))
        generated: list[Completed] = []
        for request in new:
            if request.index in calling:
                harnesses.start(request)
            elif any(talk.ended is None for talk in request.talks):
                conversations.resume(request, self.engine)
            elif request.is_generated:
                generated.append((request, request.so_far))
            else:
                hints = replace(request.hints, goes_on=conversations.goes_on(request))
                self.engine.submit(replace(request, hints=hints))
        self._take(generated)
        self._settle()

    def step(self) -> None:
        """Let the engine do a step, and have what it completed judged."""
        self._take(self.engine.step())

    def _take(self, done: Sequence[Completed]) -> None:
        turns: list[Completed] = []
        if self.goal.in_rounds:  # what has several turns is generated when it has ended, which `settle` sees
            turns = [each for each in done if self._goes_on(each[0])]
            done = [each for each in done if not self._goes_on(each[0])]
        for request, completions in [*turns, *self.goal.take(done, self.engine)]:
            if request.place.call is None:
                self.conversations.add_turn(request, completions)
            else:
                self.harnesses.add_answer(request, completions[0])

    def _goes_on(self, request: Request) -> bool:
        return request.place.call is not None or self.conversations.goes_on(request)

    @property
    def holds_back(self) -> bool:
        """True while the engine makes no step, see `Goal.in_rounds`."""
        return self.goal.in_rounds and self.conversations.waiting

    @property
    def waiting(self) -> bool:
        """True while an environment's answer is due, the same on all ranks of a model copy."""
        return any(part.waiting for part in self._parts)

    def submit_turns(self) -> None:
        """Give the engine the turns and calls that came; collective in a model copy."""
        for part in self._parts:
            part.submit_turns(self.engine)
        self._settle()

    def _settle(self) -> None:
        if self.goal.in_rounds and not self.holds_back:
            self.goal.settle(self.finished, self._pause)

    def _pause(self) -> list[Request]:
        unfinished = self.engine.interrupt() if self.engine.has_unfinished else []
        if self.harnesses is None:
            return self.conversations.pause(unfinished)
        calls = [request for request in unfinished if request.place.call is not None]
        others = [request for request in unfinished if request.place.call is None]
        return self.conversations.pause(others) + self.harnesses.pause(calls)

    async def wait(self, seconds: float) -> None:
        """Wait until an environment has answered, or has called, for ``seconds`` at most.

        Of the leader of a model copy; the others have nothing to wait for.
        """
        asked, calls = self._asked, set()
        if not asked:
            return
        if self.harnesses is not None and self.harnesses.waiting:
            calls = {asyncio.create_task(self.harnesses.wait_for_call(seconds))}
        await asyncio.wait(asked | calls, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()

    async def cancel(self) -> None:
        """Ask no more; the last call."""
        asked = self._asked
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    @property
    def _asked(self) -> set[asyncio.Task]:
        """What environments are doing; of the leader."""
        return set().union(*(part.asked for part in self._parts))
