"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): rounds of a step finish the first groups drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.platform.collectives import any_rank, broadcast_json, gather_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.collector import Collector, StepRollouts
from megatron_rl.rollout.filtering import counts_in
from megatron_rl.rollout.journal import StepJournal, record_of
from megatron_rl.rollout.rollouter import Goal
from megatron_rl.rollout.statistics import staleness_metrics
from megatron_rl.types import RolloutGroup

OPEN, IDLE, COUNTS = 0, 1, 2
"""A group that is not finished; one that is and does not count; one that counts."""
_LOOK_EVERY = 8
"""Engine steps between two looks where several ranks step together."""


@dataclass
class SampledStep(StepRollouts):
    """A step, and the prompts that it turned out not to need."""

    extra: dict[int, RolloutGroup] = field(default_factory=dict)
    """Finished groups that were not needed."""


@dataclass(kw_only=True)
class DynamicCollector(Collector):
    """Draws until enough groups count; what counts and is too many may be kept for the next steps."""

    at_once: int
    """Prompts of the first round, and the most of a later one."""
    max_staleness: int
    """For how many steps groups that counted and were too many may be used; 0 gives them up."""

    def fill(self, seed: int, policy_version: int, journal: StepJournal) -> SampledStep | None:
        """See `Collector`."""
        start = self.source.position()
        self.extra_groups.drop_older(policy_version - self.max_staleness)
        step = super().fill(seed, policy_version, journal)
        if step is not None and len(step.drawn) < step.started:  # the others' prompts come again
            self.source.return_to(start)
            self.source.draw(len(step.drawn))
        return step

    def begin(self, policy_version: int) -> SampledStep:
        """See `Collector`."""
        return SampledStep(policy_version)

    def add_round(self, step: SampledStep, seed: int, journal: StepJournal) -> bool:
        """See `Collector`."""
        first, size = len(step.drawn), self.round_size(step, self.at_once)
        wanted = self.prompts_per_step - len(step.counting)
        drawn = self.source.draw(size)
        quota = Quota(wanted, range(first, first + size), self.dynamic.counts, self.groups, self.max_staleness > 0)
        requests = self.requests_of_this_rank(drawn, first)
        result = self.rollouter.run(requests, seed, step.policy_version, journal, quota)
        if result is None:
            return False
        states = quota.states[: quota.num_needed]
        step.counting += [place for place, state in enumerate(states, start=first) if state == COUNTS]
        step.drawn += drawn[: len(states)]
        step.started += size
        for number, group in sorted(result.finished.items()):
            (step.answered if number < len(step.drawn) else step.extra)[number] = group
        step.add_work(result)
        return True

    def commit(self, step: SampledStep) -> dict[str, float]:
        """See `Collector`."""
        metrics, replicas = super().commit(step), self.groups.rollout_group
        if self.max_staleness:
            metrics |= staleness_metrics(step.groups, step.policy_version, replicas)
            extra = [record_of(group) for group in step.extra.values() if counts_in(self.dynamic.counts, group)]
            kept = [record for part in gather_json(extra, replicas) for record in part]
            self.extra_groups.turn_over(step.drawn, kept)
            metrics["perf/surplus_groups"] = float(len(kept))
        return metrics


class Quota(Goal):
    """Ends a rollout once ``wanted`` groups count: the first ones, in the order in which they were drawn.

    Whoever is done first does not win: that would prefer short answers, and which groups a step has would depend on
    the clock. So a step ends when all groups up to the last one needed are finished, and later ones are given up. Where
    extra groups are kept all are finished: those that are done by then would be a choice of the clock.

    Replicas do not wait for each other: the sum of what they know is on its way while they generate. The next one is
    begun when it has arrived, so all have seen the same sums in the same order, and all decide alike.
    """

    def __init__(
        self, wanted: int, numbers: range, counts: Callable[[Tensor], bool], groups: ParallelGroups,
        finishes_all: bool = False,
    ) -> None:  # fmt: skip
        """``numbers`` are those of the groups that all replicas together generate; ``counts`` is a `GroupFilter`."""
        self._wanted, self._finishes_all = wanted, finishes_all
        self._numbers = numbers
        self._counts = counts
        self._groups = groups
        self._known: dict[int, int] = {}
        self._sum, self._work = torch.zeros(0), None
        self._steps = 0
        self.states: list[int] = []
        """Of each group, once `is_met`: the same on all ranks."""

    def is_met(self, finished: Mapping[int, RolloutGroup], idle: bool) -> bool:
        """See `Goal`."""
        self._steps += 1
        alone = self._groups.lockstep_group.size() == 1
        if not (alone or idle or self._steps % _LOOK_EVERY == 0):
            return False
        leads = self._groups.leads_model
        if leads and not self._ended:
            self._exchange(finished)
        if alone:
            return self._ended
        if not any_rank(leads and self._ended, self._groups.lockstep_group):
            return False
        while leads and not self._ended:  # the sum that another copy has seen is on its way
            self._exchange(finished, waits=True)
        self.states, self.was_left = broadcast_json(
            [self.states, self.was_left], self._groups.model_leader(), self._groups.model_group
        )
        return True

    def leave(self) -> None:
        """See `Goal`: the other replicas hear of it, and stop."""
        while self._groups.leads_model and not self._ended:
            self._exchange({}, waits=True, leaves=True)

    @property
    def _ended(self) -> bool:
        return bool(self.states) or self.was_left

    def _exchange(self, finished: Mapping[int, RolloutGroup], waits: bool = False, leaves: bool = False) -> None:
        """Take in the sum that has arrived, or is waited for, and send the next one unless it has decided."""
        if self._work is not None and (waits or self._work.is_completed()):
            self._work.wait()
            self._work = None
            self._decide(*self._sum.split([len(self._numbers), 1]))
        if self._work is not None or self._ended:
            return
        own = [self._state(number, finished) for number in self._numbers]
        self._sum = torch.tensor([*own, int(leaves)])
        self._work = dist.all_reduce(self._sum, group=self._groups.rollout_group, async_op=True)

    def _decide(self, states: Tensor, left: Tensor) -> None:
        """Take a decision from a sum. Every group is one replica's, which adds its state; the others add 0."""
        self.was_left, known = bool(left), states.tolist()
        awaited = known if self._finishes_all else known[: self._needed(known)]
        if not self.was_left and OPEN not in awaited:
            self.states = known

    @property
    def num_needed(self) -> int:
        """Return how many of the first groups contain all that pass; all of them if there are too few."""
        return self._needed(self.states)

    def _needed(self, states: list[int]) -> int:
        places = [place for place, state in enumerate(states) if state == COUNTS]
        return places[self._wanted - 1] + 1 if len(places) >= self._wanted else len(states)

    def _state(self, number: int, finished: Mapping[int, RolloutGroup]) -> int:
        if number not in finished:
            return OPEN
        if number not in self._known:
            self._known[number] = COUNTS if counts_in(self._counts, finished[number]) else IDLE
        return self._known[number]
