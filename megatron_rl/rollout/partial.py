"""Partial rollouts: a step takes the groups that are generated first, and the others go on in the next step.

    groups in flight    a a | b b b b      a: unfinished after the step before, b: drawn now
    this step           ✓ ✓   ✓ ✓ . .      --grpo-prompts-per-step of them are generated, and trained on
    the next step           . . | c c c c  the others keep their tokens and go on with newer weights

With dynamic sampling some of those taken (✓) do not count. They are dropped, and another round of the same step draws
new prompts in their places and takes as many as are still missing. Groups that count and are too many wait, graded.

Which groups are generated first, a replica sees at the steps of its own engine. No clock and no other replica has a
part in it, so a step that is done again has the same groups; but for those of harnesses, whose programs take the time
that they take. `training/groups_by_clock` counts these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from megatron_rl.inference.engine import Engine
from megatron_rl.platform.collectives import gather_json
from megatron_rl.rollout.collector import Collector, StepRollouts
from megatron_rl.rollout.filtering import counts_in
from megatron_rl.rollout.journal import (
    FinishedGroups,
    Record,
    Records,
    StepJournal,
    asked_of,
    completion_of,
    described,
    described_rollout,
    rollout_of,
)
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, deal, drawn_for
from megatron_rl.rollout.rollouter import Goal
from megatron_rl.rollout.statistics import staleness_metrics
from megatron_rl.rollout.trace import divided
from megatron_rl.types import Completed, Request, RolloutGroup, Talk

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartialRollouts:
    """Settings of partial rollouts: how far generation may run ahead."""

    at_once: int
    """Groups in flight."""
    max_staleness: int
    """Steps by which the oldest token of a sample that is trained on may be behind, 1 or more."""
    finishes: bool
    """Groups are generated before they are too old; else those that are too old are dropped."""
    in_rounds: bool = False
    """See `Goal`; where an environment replies or calls."""
    by_clock: frozenset[str] = frozenset()
    """Environments that call the model by themselves: how fast they are has a part in which groups end first."""

    def due(self, requests: Sequence[Request], policy_version: int, wanted: int) -> set[int]:
        """Return the places of those ``requests`` that must be among the ``wanted`` ones of this step.

        A group may be used in as many later steps as its age leaves it. Each of them takes ``wanted`` groups: where
        more have to be used by then, the oldest of them are due now. That is at most ``wanted`` as long as no more
        than ``wanted`` x (``max_staleness`` + 1) groups are in flight; then the youngest are in time whoever goes now.
        """
        if not self.finishes:
            return set()
        oldest = [oldest_version(request, policy_version) for request in requests]
        order, count = sorted(range(len(oldest)), key=lambda place: (oldest[place], place)), 0
        for number, place in enumerate(order, start=1):
            if oldest[place] == max(oldest):
                break
            later_steps = self.max_staleness - (policy_version - oldest[place])
            count = max(count, number - wanted * later_steps)
        return set(order[: min(count, wanted)])


@dataclass
class PartialStep(StepRollouts):
    """A step, and what goes on without it."""

    unfinished: list[Record] = field(default_factory=list)
    """Of all replicas: the groups that go on in the next round or step."""
    dropped: list[Request] = field(default_factory=list)
    """Unfinished groups that are too old."""


@dataclass(kw_only=True)
class PartialCollector(Collector):
    """Takes the groups that are generated first, and keeps the others for the next step."""

    partial: PartialRollouts
    unfinished: UnfinishedGroups

    def begin(self, policy_version: int) -> PartialStep:
        """See `Collector`."""
        return PartialStep(policy_version, unfinished=self.unfinished.records)

    def add_round(self, step: PartialStep, seed: int, journal: StepJournal) -> bool:
        """See `Collector`: unfinished groups, and new ones, until enough are generated."""
        requests, settings, groups = self._in_flight(step), self.partial, self.groups
        due, size = set(), self.round_size(step, max(self.prompts_per_step, settings.at_once // 2))
        if not step.rounds:  # what was due is then gone
            due, size = settings.due(requests, step.policy_version, self.prompts_per_step), self.prompts_per_step
        goal = goal_of(requests, due, size, self.expected_lengths, groups.rollout_rank, groups.rollout_size)
        goal.in_rounds = settings.in_rounds
        own = list(map(self.expecting, goal.requests))
        result = self.rollouter.run(own, seed, step.policy_version, journal, goal)
        if result is None:
            return False
        counting, extra = self._counting(result.finished, self.prompts_per_step - len(step.counting))
        for index in extra & result.finished.keys():
            goal.unfinished.append(graded(requests[index], result.finished.pop(index)))
        taken, step.unfinished = gathered(goal, result.finished, groups.rollout_group)
        places = {index: place for place, index in enumerate(taken, start=len(step.drawn))}
        step.answered |= {places[index]: group for index, group in result.finished.items()}
        step.counting += [places[index] for index in counting]
        step.drawn += [requests[index].source for index in taken]
        step.add_work(result)
        return True

    def _in_flight(self, step: PartialStep) -> list[Request]:
        """Return the groups that go on and new ones, numbered from 0; those that are too old are dropped."""
        kept: list[Request] = []
        for request in UnfinishedGroups(step.unfinished).requests(self.source, self.factory, self.group_size):
            is_too_old = step.policy_version - oldest_version(request, step.policy_version) > self.partial.max_staleness
            (step.dropped if is_too_old else kept).append(request)
        drawn = self.source.draw(max(0, self.partial.at_once - len(kept)))
        kept += [self.factory.request(source, self.group_size, 0) for source in drawn]
        step.started += len(drawn)
        return [replace(request, index=place) for place, request in enumerate(kept)]

    def _counting(self, finished: Mapping[int, RolloutGroup], missing: int) -> tuple[list[int], set[int]]:
        """Return the indices of the first ``missing`` groups that count, and of those that are too many; collective."""
        own = [index for index, group in finished.items() if not self.dynamic or counts_in(self.dynamic.counts, group)]
        every = sorted(index for part in gather_json(own, self.groups.rollout_group) for index in part)
        return every[:missing], set(every[missing:])

    def commit(self, step: PartialStep) -> dict[str, float]:
        """See `Collector`."""
        metrics = super().commit(step)
        self.unfinished.records = step.unfinished
        if by_clock := self.partial.by_clock:
            metrics["training/groups_by_clock"] = float(sum(task.environment in by_clock for task in step.drawn))
        return metrics | staleness_metrics(step.groups, step.policy_version, self.groups.rollout_group) | {
            "training/groups_started": float(step.started),
            "training/groups_put_aside": float(len(step.unfinished)),
            "training/groups_dropped": float(len(step.dropped)),
            "training/tokens_dropped": float(sum(s.num_written for r in step.dropped for s in drawn_for(r))),
        }


def graded(request: Request, group: RolloutGroup) -> Request:
    """Return ``request`` as it waits with the grades of its ``group``."""
    so_far = tuple(rollout.completion for rollout in group.rollouts)
    return replace(request, so_far=so_far, talks=tuple(Talk(ended=rollout) for rollout in group.rollouts))


def oldest_version(request: Request, policy_version: int) -> int:
    """Return the version of the oldest token of its samples; ``policy_version`` where there is none."""
    return min((sample.stretches[0][0] for sample in drawn_for(request) if sample.token_ids), default=policy_version)


@dataclass
class PartialGoal(Goal):
    """The groups that one replica has to generate in a step; the rest stays unfinished."""

    requests: Sequence[Request]
    """This replica's part of the groups in flight."""
    due: set[int]
    """Indices of those that must be generated."""
    others: int
    """How many besides, the first ones."""
    unfinished: list[Request] = field(default_factory=list)
    in_rounds: bool = False
    _taken: set[int] = field(default_factory=set)

    def take(self, done: Sequence[Completed], engine: Engine) -> list[Completed]:
        """Return the generated groups that the step takes; once there are enough, the ``engine`` is interrupted."""
        taken = []
        for request, completions in sorted(done, key=lambda completed: completed[0].index):
            if self._takes(request.index):
                taken.append((request, completions))
            else:  # generated while what is due was not
                self.unfinished.append(replace(request, so_far=completions))
        if not self.due and not self.others and engine.has_unfinished and not self.in_rounds:
            self.unfinished += engine.interrupt()
        return taken

    def settle(self, finished: FinishedGroups, pause: Callable[[], list[Request]]) -> None:
        """Take the groups that have ended, in their order; with enough of them, all others wait."""
        for index in sorted(finished.groups.keys() - self._taken):
            if not self._takes(index):
                asked, group = next(r for r in self.requests if r.index == index), finished.groups[index]
                finished.give_back(index)
                self.unfinished.append(graded(asked, group))
        if not self.due and not self.others:
            self.unfinished += pause()

    def _takes(self, index: int) -> bool:
        """Return whether the step takes a group that is generated, and count it."""
        if index not in self.due and self.others <= 0:
            return False
        self.others -= index not in self.due
        self.due.discard(index)
        self._taken.add(index)
        return True


def goal_of(
    requests: Sequence[Request], due: set[int], wanted: int, expected: ExpectedLengths, rank: int, num_ranks: int
) -> PartialGoal:
    """Return what replica ``rank`` has to generate: about as many tokens as the others, due or not."""
    old = [request for request in requests if request.index in due]
    rest = [request for request in requests if request.index not in due]
    ranks_of_old, ranks_of_rest = deal(old, expected, num_ranks), deal(rest, expected, num_ranks)
    own_old = [request for request, place in zip(old, ranks_of_old, strict=True) if place == rank]
    own_rest = [request for request, place in zip(rest, ranks_of_rest, strict=True) if place == rank]
    # Of the rest a replica gives what its groups are of all, counted in the order of the replicas: sums are exact.
    left, count = wanted - len(due), max(1, len(rest))
    before = sum(place < rank for place in ranks_of_rest)
    others = left * (before + len(own_rest)) // count - left * before // count
    return PartialGoal(own_old + own_rest, {request.index for request in own_old}, others)


class UnfinishedGroups(Records):
    """The groups in flight between two steps."""

    def requests(self, source: PromptSource, factory: RequestFactory, group_size: int) -> list[Request]:
        """Return what goes on, the oldest draws first, numbered from 0, without what no longer fits the run."""
        found: list[Request] = []
        for record in self.records:
            environment, task_id, epoch, *_ = record["asked"]
            drawn = source.find(environment, task_id, epoch)
            if drawn is not None:
                talks = tuple(talk_of(talk, factory.wants_routing) for talk in record.get("talks", ()))
                so_far = tuple(
                    talks[number].ended.completion if sample is None else completion_of(sample, factory.wants_routing)
                    for number, sample in enumerate(record["samples"])
                )
                request = replace(factory.request(drawn, group_size, len(found)), so_far=so_far, talks=talks)
                if asked_of(request) == record["asked"] and _can_go_on(request, factory):
                    found.append(request)
        if len(found) < len(self.records):
            logger.warning(
                "%d of %d unfinished groups are dropped: the task, --grpo-group-size, --rl-max-new-tokens or "
                "--rl-router-replay is another one now", len(self.records) - len(found), len(self.records),
            )  # fmt: skip
        return found


def gathered(goal: PartialGoal, finished: Iterable[int], replicas: dist.ProcessGroup) -> tuple[list[int], list[Record]]:
    """Gather the indices of generated groups, and records of unfinished ones, of all replicas; collective."""
    own = [[request.index, waiting_record(request)] for request in goal.unfinished]
    parts = gather_json([list(finished), own], replicas)
    records = sorted((entry for _, part in parts for entry in part), key=lambda entry: entry[0])
    return sorted(index for indices, _ in parts for index in indices), [record for _, record in records]


def waiting_record(request: Request) -> Record:
    """Return a request that goes on in the next step as JSON values."""
    ended = [talk.ended is not None for talk in request.talks] or [False] * len(request.so_far)
    samples = [None if ends else described(said) for said, ends in zip(request.so_far, ended, strict=True)]
    record = {"asked": asked_of(request), "samples": samples}
    if request.talks:
        record["talks"] = [vars(talk) | _described_talk(talk) for talk in request.talks]
    return record


def _described_talk(talk: Talk) -> Record:
    calls = None if talk.calls is None else {key: described(answer) for key, answer in talk.calls.items()}
    return {"calls": calls, "ended": talk.ended and described_rollout(talk.ended)}


def talk_of(record: Record, wants_routing: bool) -> Talk:
    """Return what `waiting_record` wrote of one sample."""
    calls, ended = record["calls"], record["ended"]
    if calls is not None:
        calls = {key: completion_of(answer, wants_routing) for key, answer in calls.items()}
    return Talk(record["state"], tuple(record["earned"]), calls, ended and rollout_of(ended, wants_routing))


def _can_go_on(request: Request, factory: RequestFactory) -> bool:
    """Return whether every unfinished sample may have another token, and finished ones have the experts wanted.

    Those of an unfinished sample are recorded when it is finished: the engine feeds it all its tokens again.
    """
    finished = [completion for completion in drawn_for(request) if completion.finish_reason is not None]
    if factory.wants_routing and any(completion.routing is None for completion in finished):
        return False
    of_harness = any(talk.calls is not None for talk in request.talks)  # its limits are part of its calls' keys
    for sample in request.so_far:
        if sample.finish_reason is not None or of_harness:
            continue
        begun = divided(sample)[2] if request.talks else sample
        if len(begun.token_ids) >= request.sampling.max_new_tokens:
            return False
        if len(request.prompt_ids) + len(sample.token_ids) >= factory.max_sequence_length:
            return False
    return True
