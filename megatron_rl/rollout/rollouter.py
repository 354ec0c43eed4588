"""Generate groups and grade them, or answer their turns, while the rest still generates."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist
import uvloop

from megatron_rl.inference import Engine, EngineStatistics
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import any_rank, broadcast_json, max_over
from megatron_rl.platform.memory import OutOfMemoryTogether, is_out_of_memory, reason_of
from megatron_rl.rollout.conversations import PENDING, Conversations, ConversationSettings
from megatron_rl.rollout.journal import StepJournal
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, GradeResult, Request, Rollout, RolloutGroup, Task, Transcript

GradeFunction = Callable[[str, Sequence[tuple[Task, Transcript]]], Awaitable[Sequence[GradeResult]]]
"""(environment, [(task, transcript)]) -> one result each; never raises for a bad sample."""

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

_STOP_CHECK_EVERY = 8
"""Engine steps between two looks at the stop request when several ranks must agree on it."""
_STOP_CHECK_SECONDS = 0.2
"""The same while only grades are waited for."""


@dataclass(frozen=True)
class RolloutResult:
    """What one call of `Rollouter.run` brought."""

    groups: tuple[RolloutGroup, ...]
    """Ordered like the requests."""
    statistics: EngineStatistics
    generate_seconds: float
    grade_wait_seconds: float
    """How long grading held the run up after the last token."""
    cancelled: bool
    """True on every rank of the job when one of them was asked to stop; groups are then empty."""


class Rollouter:
    """Owns the event loop in which generation and grading overlap.

    Every rank of a model-parallel group generates; only the leader talks to the environment
    server, and its verdicts are broadcast.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        groups: ParallelGroups,
        grade: GradeFunction,
        stop: StopRequest,
        grace_seconds: float = 0.0,
        conversations: ConversationSettings | None = None,
    ) -> None:
        """After a request to stop, a rollout goes on for ``grace_seconds`` before it is cancelled.

        Without ``conversations`` every environment has single answers.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._groups = groups
        self._grade = grade
        self._stop = stop
        self._grace_seconds = grace_seconds
        self._conversations = conversations
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(
        self,
        requests: Sequence[Request],
        seed: int,
        policy_version: int,
        journal: StepJournal | None = None,
    ) -> RolloutResult:
        """Complete and grade all ``requests``; collective over the whole job.

        Groups that the ``journal`` knows are taken from it, the others are written to it as they are finished. Of a
        group whose grades failed the completions are taken; what has no grade is graded again.

        Raises:
            OutOfMemoryTogether: a rank without tensor-parallel companions ran out of memory.
        """
        self._engine.begin(seed, policy_version)
        result, shortage = None, ""
        try:
            result = self._complete(self._run(requests, journal))
        except (RuntimeError, MemoryError) as error:
            # The companions of a model copy wait inside the engine; ranks without any have met nobody yet.
            if not is_out_of_memory(error) or self._groups.model_group.size() > 1:
                raise
            traceback.clear_frames(error.__traceback__)
            shortage = reason_of(error)
        finally:
            if journal is not None:
                journal.close()
        ends = {"cancelled": float(result is not None and result.cancelled), "out of memory": float(result is None)}
        ends = max_over(ends, dist.group.WORLD)
        if ends["out of memory"]:
            raise OutOfMemoryTogether(shortage or "on another rank")
        if ends["cancelled"]:
            return RolloutResult((), result.statistics, 0.0, 0.0, cancelled=True)
        return result

    def call(self, awaitable: Awaitable[None]) -> None:
        """Run something of the grader's on the same event loop (closing its connection)."""
        self._complete(awaitable)

    def close(self) -> None:
        """Stop the event loop."""
        self._runner.close()

    def _complete(self, awaitable: Awaitable[_Result]) -> _Result:
        """Not ``Runner.run``: with Python's own SIGINT handler it formats the whole result into an error
        message that nobody sees, 5 ms for 128 short answers and seconds for a batch of long ones.
        """
        return self._runner.get_loop().run_until_complete(awaitable)

    async def _run(self, requests: Sequence[Request], journal: StepJournal | None) -> RolloutResult:
        started = time.perf_counter()
        conversations = Conversations(self._conversations, self._tokenizer, self._groups, journal)
        known = self._submit(requests, journal, conversations)
        grading = {
            index: asyncio.create_task(self._graded(index, group, journal))
            for index, group in known.items()
            if not group.is_graded
        }
        steps, cancelled = 0, False
        while (self._engine.has_unfinished or conversations.waiting) and not cancelled:
            for request, completions in self._engine.step():
                if conversations.takes(request):
                    conversations.add_turn(request, completions)
                else:
                    group = self._group(request, completions, [PENDING] * len(completions))
                    grading[request.index] = asyncio.create_task(self._graded(request.index, group, journal))
            for turn in await conversations.replies(idle=not self._engine.has_unfinished):
                self._engine.submit(turn)
            steps += 1
            cancelled = self._must_stop(steps)
            await asyncio.sleep(0)  # let the connections to the environment server move
        generated = time.perf_counter()
        cancelled = cancelled or await self._stopped_while_grading(grading.values())
        if cancelled:
            self._engine.abort()
            for task in grading.values():
                task.cancel()
            await asyncio.gather(*grading.values(), conversations.cancel(), return_exceptions=True)
            return RolloutResult((), self._engine.statistics, 0.0, 0.0, cancelled=True)
        done = known | conversations.finished | {index: task.result() for index, task in grading.items()}
        ordered = [done[request.index] for request in requests]
        waited = time.perf_counter() - generated
        groups = self._share_grades(ordered)
        return RolloutResult(
            tuple(groups), self._engine.statistics, generated - started, waited, cancelled=False
        )

    def _submit(
        self, requests: Sequence[Request], journal: StepJournal | None, conversations: Conversations
    ) -> dict[int, RolloutGroup]:
        """Give the engine what is to be generated; the groups of an earlier start by the index of their request."""
        known: dict[int, RolloutGroup] = {}
        for request in requests:
            goes_on = conversations.takes(request)
            group = journal.group_for(request) if journal is not None else None
            if group is None or (goes_on and not group.is_graded):  # nobody knows how it would have gone on
                self._engine.submit(replace(request, goes_on=goes_on))
            else:
                completions, grades = zip(*((r.completion, r.grade) for r in group.rollouts), strict=True)
                known[request.index] = self._group(request, completions, grades)
        if known:
            logger.info("%d of %d groups come from the journal", len(known), len(requests))
        return known

    def _must_stop(self, steps: int) -> bool:
        """The ranks of one model copy step together, so they must also stop together."""
        model_group = self._groups.model_group
        if model_group.size() == 1:
            return self._stop_is_due
        return steps % _STOP_CHECK_EVERY == 0 and any_rank(self._stop_is_due, model_group)

    @property
    def _stop_is_due(self) -> bool:
        return self._stop.requested and self._stop.seconds >= self._grace_seconds

    async def _stopped_while_grading(self, grading: Collection[asyncio.Task[RolloutGroup]]) -> bool:
        """Wait for the grades; True when asked to stop before the last one: a grader may take its time."""
        pending = set(grading)
        while pending and not self._stop_is_due:
            _, pending = await asyncio.wait(pending, timeout=_STOP_CHECK_SECONDS)
        model_group = self._groups.model_group
        return bool(pending) if model_group.size() == 1 else any_rank(bool(pending), model_group)

    def _group(
        self, request: Request, completions: Sequence[Completion], grades: Sequence[GradeResult]
    ) -> RolloutGroup:
        decode = self._tokenizer.decode
        rollouts = [Rollout(c, decode(c.token_ids), grade) for c, grade in zip(completions, grades, strict=True)]
        return RolloutGroup(request.source, request.prompt_ids, decode(request.prompt_ids), tuple(rollouts))

    async def _graded(self, index: int, group: RolloutGroup, journal: StepJournal | None) -> RolloutGroup:
        """What has no grade is graded, or graded again."""
        rollouts = list(group.rollouts)
        if self._groups.leads_model:
            due = [sample for sample, rollout in enumerate(rollouts) if rollout.grade.status != "ok"]
            items = [(group.source.task, _transcript(rollouts[sample])) for sample in due]
            for sample, grade in zip(due, await self._grade(group.source.environment, items), strict=True):
                rollouts[sample] = replace(rollouts[sample], grade=grade)
        finished = replace(group, rollouts=tuple(rollouts))
        if journal is not None:
            journal.add(index, finished)
        return finished

    def _share_grades(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Give the leader's verdicts to the other ranks of the model copy."""
        if self._groups.model_group.size() == 1 or not groups:
            return groups
        verdicts = [r.grade.reward if r.grade.status == "ok" else None for group in groups for r in group.rollouts]
        rewards = iter(broadcast_json(verdicts, self._groups.model_leader(), self._groups.model_group))
        if self._groups.leads_model:
            return groups
        return [
            replace(group, rollouts=tuple(replace(r, grade=_verdict(next(rewards))) for r in group.rollouts))
            for group in groups
        ]


def _transcript(rollout: Rollout) -> Transcript:
    return Transcript(rollout.text, rollout.completion.finish_reason, len(rollout.completion.token_ids))


def _verdict(reward: float | None) -> GradeResult:
    if reward is not None:
        return GradeResult("ok", reward=reward)
    return GradeResult("error", code="see_leader", message="the leading rank's record has the reason")
