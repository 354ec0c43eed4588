"""Generate groups and grade them, or answer their turns, while the rest still generates."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
import uvloop

from megatron_rl.inference.engine import Engine, EngineStatistics
from megatron_rl.platform.collectives import any_rank, max_over
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.platform.memory import OutOfMemoryTogether, is_out_of_memory, reason_of
from megatron_rl.rollout.conversations import Conversations, ConversationSettings, GradeFunction
from megatron_rl.rollout.harnesses import Harnesses, HarnessSettings
from megatron_rl.rollout.journal import FinishedGroups, StepJournal
from megatron_rl.rollout.partial import Share, is_generated
from megatron_rl.rollout.quota import Quota
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completed, Request, RolloutGroup

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.005
_WAIT_SECONDS = 0.2
"""Longest wait for an environment when nothing generates: a request to stop must be noticed."""
_EXCHANGE_EVERY = 8
"""Engine steps between two exchanges of ranks that step together: of a request to stop, and of grades where no
environment replies. Each lets pipeline stages wait for each other, which costs a pass of a lane."""


@dataclass(frozen=True)
class RolloutResult:
    """What one call of `Rollouter.run` brought."""

    finished: dict[int, RolloutGroup]
    """By the index of their request, in the order of the requests: all of them, with a quota those that are done, with
    a share those that it took."""
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
        self._conversations = conversations
        self._harnesses = harnesses
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(
        self,
        requests: Sequence[Request],
        seed: int,
        policy_version: int,
        journal: StepJournal | None = None,
        quota: Quota | None = None,
        share: Share | None = None,
    ) -> RolloutResult | None:
        """Complete and grade all ``requests``, those that the ``share`` takes, or until the ``quota`` is met.

        Collective over the whole job.

        Groups that the ``journal`` knows are taken from it, the others are written to it as they are finished. None on
        every rank of the job when one of them was asked to stop.

        Raises:
            OutOfMemoryTogether: a rank that steps alone ran out of memory.
        """
        self._engine.begin(seed, policy_version)
        result, shortage = None, ""
        try:
            # Not ``Runner.run``: with Python's own SIGINT handler it formats the whole result into an error message
            # that nobody sees, 5 ms for 128 short answers and seconds for a batch of long ones.
            result = self._runner.get_loop().run_until_complete(self._run(requests, journal, quota, share))
        except (RuntimeError, MemoryError) as error:
            # Those that step together wait inside the engine; ranks that step alone have met nobody yet.
            if not is_out_of_memory(error) or self._groups.lockstep_group.size() > 1:
                raise
            traceback.clear_frames(error.__traceback__)
            shortage = reason_of(error) or "no memory"
        if result is None and quota is not None:
            quota.leave()
        ends = max_over({"stopped": result is None, "out of memory": bool(shortage)}, dist.group.WORLD)
        if ends["out of memory"]:
            raise OutOfMemoryTogether(shortage or "on another rank")
        return None if ends["stopped"] else result

    def close(self) -> None:
        """Stop the event loop."""
        self._runner.close()

    async def _run(
        self, requests: Sequence[Request], journal: StepJournal | None, quota: Quota | None, share: Share | None
    ) -> RolloutResult | None:
        finished, started = FinishedGroups(self._tokenizer, journal), time.perf_counter()
        conversations = Conversations(self._grade, self._conversations, self._tokenizer, self._groups, finished)
        samples = _Samples(finished, conversations, Harnesses(self._harnesses, self._groups, finished))
        try:
            generated = await self._generate(requests, samples, quota, share)
        finally:
            await samples.cancel()
        if generated is None or (quota is not None and quota.was_left):
            return None
        numbers = (request.index for request in requests if request.index in finished.groups)
        groups = {number: finished.groups[number] for number in numbers}
        return RolloutResult(groups, self._engine.statistics, generated - started, time.perf_counter() - generated)

    async def _generate(
        self, requests: Sequence[Request], samples: _Samples, quota: Quota | None, share: Share | None
    ) -> float | None:
        """Until there is all that is wanted: when the last token was drawn. None when it was asked to stop."""
        engine, finished = self._engine, samples.finished.groups
        self._begin(requests, samples, share)
        generated: float | None = time.perf_counter()
        for steps in itertools.count():
            # Once all groups are finished, nobody waits for what the engine may still have of them.
            generating, waiting = self._on_any_copy(
                engine.has_unfinished and len(finished) < len(requests), samples.waiting
            )
            idle = not (generating or waiting)
            if idle if quota is None else quota.is_met(finished, idle):
                break
            if generating:
                self._take(engine.step(), samples, share)
                samples.harnesses.show(engine)
                generated = time.perf_counter()
            else:
                await samples.wait(_WAIT_SECONDS)
            if not generating or self._heeds_answers(steps):
                samples.submit_turns(engine)
            if self._must_stop(steps + 1):
                generated = None
                break
            # Let the connections to the environment server move; where other replicas still generate, let them.
            await asyncio.sleep(_LOOK_AGAIN_SECONDS if idle else 0)
        if generated is None or quota is not None or self._harnesses is not None:
            engine.abort()
        return generated

    def _begin(self, requests: Sequence[Request], samples: _Samples, share: Share | None) -> None:
        """Submit what no earlier start has answered."""
        leads, take_up = samples.harnesses.leads, samples.conversations.take_up
        new = [request for request in requests if not take_up(request, of_harness=leads(request))]
        if len(new) < len(requests):
            logger.info("%d of %d groups were answered before", len(requests) - len(new), len(requests))
        for request in (request for request in new if not is_generated(request)):
            if leads(request):
                samples.harnesses.start(request)
            else:
                self._engine.submit(replace(request, goes_on=samples.conversations.goes_on(request)))
        self._take([(request, request.begun) for request in new if is_generated(request)], samples, share)

    def _take(self, done: Sequence[Completed], samples: _Samples, share: Share | None) -> None:
        """Hand over what is generated, as far as the step takes it."""
        for request, (completion,) in ((request, found) for request, found in done if request.call is not None):
            samples.harnesses.add_answer(request, completion)
        done = [(request, completions) for request, completions in done if request.call is None]
        for request, completions in done if share is None else share.take(done, self._engine):
            samples.conversations.add_turn(request, completions)

    def _on_any_copy(self, *facts: bool) -> tuple[bool, ...]:
        """Which of them hold for any of the model copies that share experts; the ranks of one copy know the same."""
        groups = self._groups
        if groups.lockstep_group.size() == groups.model_group.size():
            return facts
        agreed = max_over({str(number): fact for number, fact in enumerate(facts)}, groups.lockstep_group)
        return tuple(map(bool, agreed.values()))

    def _heeds_answers(self, steps: int) -> bool:
        """At once where an answer may be a turn to generate, or concerns this rank alone."""
        settings = self._conversations
        if self._harnesses is not None:
            return True
        replies = settings is not None and any(turns > 1 for turns in settings.max_turns.values())
        return replies or self._groups.model_group.size() == 1 or steps % _EXCHANGE_EVERY == 0

    def _must_stop(self, steps: int) -> bool:
        """Ranks that step together must also stop together."""
        due = self._stop.requested and self._stop.seconds >= self._grace_seconds
        if self._groups.lockstep_group.size() == 1:
            return due
        return steps % _EXCHANGE_EVERY == 0 and any_rank(due, self._groups.lockstep_group)


@dataclass
class _Samples:
    """What one rollout waits for."""

    finished: FinishedGroups
    conversations: Conversations
    harnesses: Harnesses

    @property
    def waiting(self) -> bool:
        """True while an environment's answer is due, the same on all ranks of a model copy."""
        return self.conversations.waiting or self.harnesses.waiting

    def submit_turns(self, engine: Engine) -> None:
        """Give the engine the turns and calls that came, and take back the calls whose clients hung up."""
        replies, (calls, hung_up) = self.conversations.replies(), self.harnesses.calls()
        for turn in (*replies, *calls):
            engine.submit(turn)
        if hung_up:
            engine.cancel(hung_up)

    async def wait(self, seconds: float) -> None:
        """Until an environment has answered, or has called; of the leader, the others have nothing to wait for."""
        asked = {*self.conversations.asked, *self.harnesses.asked}
        if not asked:
            return
        call = asyncio.create_task(self.harnesses.wait_for_call(seconds))
        await asyncio.wait({*asked, call}, return_when=asyncio.FIRST_COMPLETED)
        call.cancel()

    async def cancel(self) -> None:
        """Ask no more; the last call."""
        asked = {*self.conversations.asked, *self.harnesses.asked}
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
