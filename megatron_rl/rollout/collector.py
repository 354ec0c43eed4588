"""The groups of a step: draw prompts, have them answered, and go on drawing while too few groups count.

    draw ─► deal to the replicas ─► answer and grade ─► enough? ─► the first ones that count
      ▲                                                   │
      └──────────── refill (dynamic sampling) ◄── no ─────┘

Without dynamic sampling every group counts and one draw is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.collectives import gather_json, gather_vectors
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.journal import ExtraGroups, Record, StepJournal, record_of
from megatron_rl.rollout.partial import (
    PartialRollouts,
    UnfinishedGroups,
    gathered,
    lag_metrics,
    oldest_version,
    share_of,
)
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, deal
from megatron_rl.rollout.quota import COUNTS, Quota, counts_in, graded_rewards
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.rollout.statistics import Failures, failures_of, idle_metrics, lengths_and_seconds, refuse_failures
from megatron_rl.types import Request, RolloutGroup, SourcedTask

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DynamicSampling:
    """Draw until enough groups count (DAPO, arXiv 2503.14476, section 3.2)."""

    counts: Callable[[Tensor], bool]
    """A `GroupFilter`."""
    at_once: int
    """Prompts of the first draw, and the most of a later one."""
    most_refills: int
    extra_lag: int
    """For how many steps groups that counted and were too many may be used; 0 drops them."""


@dataclass
class StepRollouts:
    """What a step was given. Groups are this replica's, the rest is the same on all."""

    drawn: list[SourcedTask] = field(default_factory=list)
    """Every prompt up to the last one that was needed."""
    answered: dict[int, RolloutGroup] = field(default_factory=dict)
    """By place in ``drawn``."""
    states: list[int] = field(default_factory=list)
    """See `Quota.states`."""
    spare: dict[int, RolloutGroup] = field(default_factory=dict)
    """Finished groups that were not needed."""
    statistics: EngineStatistics = field(default_factory=EngineStatistics)
    generate_seconds: float = 0.0
    grade_wait_seconds: float = 0.0
    failures: Failures = field(default_factory=lambda: Failures({}, ""))
    """Grades that failed, among those that were needed."""
    draws: int = 0
    started: int = 0
    """Prompts that were begun, needed or not."""
    policy_version: int = 0
    """Of the weights that generated."""
    unfinished: list[Record] = field(default_factory=list)
    """Of all replicas: the groups of partial rollouts that go on in the next step."""
    dropped: list[Request] = field(default_factory=list)
    """Groups that were begun too long ago."""

    @property
    def refills(self) -> int:
        """Draws after the first."""
        return self.draws - 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of this replica's groups among those that count, ascending."""
        places = {place: number for number, place in enumerate(self._counting)}
        return tuple(places[place] for place in sorted(self.answered) if place in places)

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """This replica's groups that count, in the order of `numbers`."""
        return tuple(self.answered[place] for place in sorted(self.answered) if self.states[place] == COUNTS)

    @property
    def num_counting(self) -> int:
        """Groups that count, on all replicas."""
        return len(self._counting)

    @property
    def _counting(self) -> list[int]:
        return [place for place, state in enumerate(self.states) if state == COUNTS]


@dataclass
class Collector:
    """Owns what is known of lengths, and the groups that are kept for the next step."""

    source: PromptSource
    factory: RequestFactory
    rollouter: Rollouter
    groups: ParallelGroups
    expected_lengths: ExpectedLengths
    """Of the training tasks; the evaluator has its own."""
    prompts_per_step: int
    group_size: int
    max_failed_share: float
    """Of the grades; more of them end the run."""
    dynamic: DynamicSampling | None = None
    wants_routing: bool = False
    """See `Request.wants_routing`."""
    extra_groups: ExtraGroups = field(default_factory=ExtraGroups)
    partial: PartialRollouts | None = None
    unfinished: UnfinishedGroups = field(default_factory=UnfinishedGroups)

    def collect(self, seed: int, policy_version: int, journal: StepJournal) -> StepRollouts | None:
        """The groups of a step; collective over the job. None when it was asked to stop: the source is as before.

        Raises:
            EnvironmentFault: too many grades failed.
        """
        start, step = self.source.position(), StepRollouts(policy_version=policy_version)
        if self.dynamic is not None:
            self.extra_groups.drop_older(policy_version - self.dynamic.extra_lag)
        if self.partial is not None:
            if not self._go_on(step, self.partial, seed, journal):
                self.source.return_to(start)
                return None
            self._refuse_failures(step)
            return step
        while step.num_counting < self.prompts_per_step and step.draws <= self._most_refills:
            if not self._draw_more(step, seed, policy_version, journal):
                self.source.return_to(start)
                return None
            self._refuse_failures(step)
        if len(step.drawn) < step.started:  # the others' prompts come again
            self.source.return_to(start)
            self.source.draw(len(step.drawn))
        if self.dynamic is not None and step.num_counting < self.prompts_per_step and self.groups.is_main:
            logger.warning(
                "%d of %d groups count after --rl-max-refills %d, of %d prompts: the step goes on with them",
                step.num_counting, self.prompts_per_step, step.refills, step.started,
            )  # fmt: skip
        return step

    def requests_of_this_rank(self, drawn: Sequence[SourcedTask], first: int = 0) -> list[Request]:
        """This replica's groups, in the order drawn; every rank has drawn the same list.

        Ranks get about the same expected tokens, so not the same number of groups. The index of a request is its
        group's place in the step, from ``first`` on.
        """
        requests = [
            self.factory.request(source, self.group_size, number) for number, source in enumerate(drawn, start=first)
        ]
        ranks = deal(requests, self.expected_lengths, self.groups.rollout_size)
        mine = [request for request, rank in zip(requests, ranks, strict=True) if rank == self.groups.rollout_rank]
        return list(map(self._expecting, mine))

    def commit(self, step: StepRollouts) -> dict[str, float]:
        """The step is finished: remember lengths, keep the extra groups; how it went. Collective over the replicas."""
        replicas, num_groups = self.groups.rollout_group, len(step.drawn)
        lengths, seconds = lengths_and_seconds(step.answered, step.generate_seconds, num_groups, replicas)
        self.expected_lengths.learn(zip(step.drawn, lengths, strict=True))
        metrics = idle_metrics(seconds)
        if self.partial is not None:
            self.unfinished.turn_over(step.unfinished)
            metrics |= lag_metrics(step.groups, step.policy_version, replicas) | {
                "training/groups_started": float(step.started),
                "training/groups_put_aside": float(len(step.unfinished)),
                "training/groups_dropped": float(len(step.dropped)),
                "training/tokens_dropped": float(sum(len(s.token_ids) for r in step.dropped for s in r.begun)),
            }
        if self.dynamic is None:
            return metrics
        if self.dynamic.extra_lag:
            metrics |= lag_metrics(step.groups, step.policy_version, replicas)
            spare = [group for group in step.spare.values() if self._counts(group)]
            kept = [record for part in gather_json(list(map(record_of, spare)), replicas) for record in part]
            self.extra_groups.turn_over(step.drawn, kept)
            metrics["perf/surplus_groups"] = float(len(kept))
        return metrics | self._rewards_of_all(step) | {
            "training/refills": float(step.refills),
            "training/groups_started": float(step.started),
            "training/groups_answered": float(num_groups),
            "training/counting_share": step.num_counting / max(num_groups, 1),
        }

    def _rewards_of_all(self, step: StepRollouts) -> dict[str, float]:
        """Those of groups that do not count, too."""
        own = [graded_rewards(group) for group in step.answered.values()]
        rewards = torch.cat(gather_vectors(torch.cat([torch.zeros(0), *own]), self.groups.rollout_group))
        if not rewards.numel():
            return {}
        mean, low, high = rewards.mean().item(), rewards.min().item(), rewards.max().item()
        metrics = {"rollout/score/mean": mean}
        if not step.num_counting:  # so that the reason can be told: what is trained on has none
            metrics |= {"critic/rewards/mean": mean, "critic/rewards/min": low, "critic/rewards/max": high}
        return metrics

    def _go_on(self, step: StepRollouts, partial: PartialRollouts, seed: int, journal: StepJournal) -> bool:
        """Unfinished groups, and new ones, until enough are generated; False when asked to stop."""
        version, wanted, groups = step.policy_version, self.prompts_per_step, self.groups
        begun = self.unfinished.requests(self.source, self.factory, self.group_size)
        kept: list[Request] = []
        for request in begun:
            is_too_old = version - oldest_version(request, version) > partial.lag
            (step.dropped if is_too_old else kept).append(request)
        drawn = self.source.draw(max(0, partial.at_once - len(kept)))
        kept += [self.factory.request(source, self.group_size, 0) for source in drawn]
        requests = [replace(request, index=place) for place, request in enumerate(kept)]
        due = partial.due(requests, version, wanted)
        share = share_of(requests, due, wanted, self.expected_lengths, groups.rollout_rank, groups.rollout_size)
        result = self.rollouter.run(
            list(map(self._expecting, share.requests)), seed, version, journal, share=share
        )
        if result is None:
            return False
        taken, step.unfinished = gathered(share, result.finished, groups.rollout_group)
        places = {index: place for place, index in enumerate(taken)}
        step.answered = {places[index]: group for index, group in result.finished.items()}
        step.drawn, step.states = [requests[index].source for index in taken], [COUNTS] * len(taken)
        step.draws, step.started, step.statistics = 1, len(drawn), result.statistics
        step.generate_seconds, step.grade_wait_seconds = result.generate_seconds, result.grade_wait_seconds
        return True

    def _expecting(self, request: Request) -> Request:
        """With its expected length, and what else the engine must know."""
        tokens = max(1, round(self.expected_lengths.completion(request)))
        return replace(request, expected_tokens=tokens, wants_routing=self.wants_routing)

    def _refuse_failures(self, step: StepRollouts) -> None:
        step.failures = failures_of(list(step.answered.values()), self.groups.rollout_group)
        refuse_failures(step.failures, len(step.drawn) * self.group_size, self.max_failed_share)

    @property
    def _most_refills(self) -> int:
        return 0 if self.dynamic is None else self.dynamic.most_refills

    def _draw_more(self, step: StepRollouts, seed: int, policy_version: int, journal: StepJournal) -> bool:
        """One draw and its answers, added to ``step``; False when the run was asked to stop."""
        first, wanted = len(step.drawn), self.prompts_per_step - step.num_counting
        drawn = self.source.draw(self._size_of_draw(step, wanted))
        requests = self.requests_of_this_rank(drawn, first)
        quota = None
        if self.dynamic is not None:
            quota = Quota(wanted, range(first, first + len(drawn)), self.dynamic.counts, self.groups)
        result = self.rollouter.run(requests, seed, policy_version, journal, quota)
        if result is None:
            return False
        needed = len(drawn) if quota is None else quota.num_needed
        step.states += [COUNTS] * needed if quota is None else quota.states[:needed]
        step.drawn += drawn[:needed]
        step.draws, step.started = step.draws + 1, step.started + len(drawn)
        for number, group in sorted(result.finished.items()):
            (step.answered if number < first + needed else step.spare)[number] = group
        step.statistics += result.statistics
        step.generate_seconds += result.generate_seconds
        step.grade_wait_seconds += result.grade_wait_seconds
        return True

    def _size_of_draw(self, step: StepRollouts, wanted: int) -> int:
        """A refill is as large as the share of groups that counted so far suggests."""
        if self.dynamic is None:
            return wanted
        if not step.num_counting:
            return self.dynamic.at_once
        return min(self.dynamic.at_once, -(-wanted * len(step.drawn) // step.num_counting))

    def _counts(self, group: RolloutGroup) -> bool:
        return counts_in(self.dynamic.counts, group)
