"""The groups of a step: draw prompts, deal them to the replicas, have them answered and graded.

    draw ─► deal to the replicas ─► answer and grade ─► enough groups count? ─► the first ones that count
      ▲                                                   │
      └──────────────────── another round ◄── no ─────────┘

With `Collector` every group that is drawn counts, so there is one round. `dynamic_sampling.py` and `partial.py` differ
in the groups that a round finishes: the first ones drawn, or the first ones generated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.filtering import DynamicSampling, rewards_of_all
from megatron_rl.rollout.journal import ExtraGroups, StepJournal
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, deal
from megatron_rl.rollout.rollouter import Rollouter, RolloutResult
from megatron_rl.rollout.statistics import Failures, failures_of, idle_metrics, lengths_and_seconds, refuse_failures
from megatron_rl.types import Request, RolloutGroup, SourcedTask

logger = logging.getLogger(__name__)


@dataclass
class StepRollouts:
    """The rollouts of a step. Groups are this replica's, the rest is the same on all."""

    policy_version: int
    """Of the weights that generate."""
    drawn: list[SourcedTask] = field(default_factory=list)
    """Every prompt whose group was needed: to be trained on, or to learn that it does not count."""
    answered: dict[int, RolloutGroup] = field(default_factory=dict)
    """By place in ``drawn``."""
    counting: list[int] = field(default_factory=list)
    """Places of the groups that are trained on, ascending."""
    rounds: int = 0
    """How often prompts were drawn and answered."""
    started: int = 0
    """Prompts drawn, needed or not."""
    statistics: EngineStatistics = field(default_factory=EngineStatistics)
    generate_seconds: float = 0.0
    grade_wait_seconds: float = 0.0
    failures: Failures = field(default_factory=lambda: Failures({}, ""))
    """Grades that failed, among those that were needed."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of this replica's groups among those that count, ascending."""
        return tuple(number for number, place in enumerate(self.counting) if place in self.answered)

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """This replica's groups that count, in the order of `numbers`."""
        return tuple(self.answered[place] for place in self.counting if place in self.answered)

    def add_work(self, result: RolloutResult) -> None:
        """Count what one call of the rollouter took."""
        self.statistics += result.statistics
        self.generate_seconds += result.generate_seconds
        self.grade_wait_seconds += result.grade_wait_seconds


@dataclass
class Collector:
    """Collects as many groups as a step wants, and learns how long they become."""

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
    extra_groups: ExtraGroups = field(default_factory=ExtraGroups)
    """Finished groups of earlier steps; only dynamic sampling leaves any."""
    dynamic: DynamicSampling | None = None
    """None: every group counts."""

    def collect(self, seed: int, policy_version: int, journal: StepJournal) -> StepRollouts | None:
        """Collect the groups of a step; collective over the job. None when asked to stop: the source is as before.

        Raises:
            EnvironmentFault: too many grades failed.
        """
        start = self.source.position()
        step = self.fill(seed, policy_version, journal)
        if step is None:
            self.source.return_to(start)
        return step

    def fill(self, seed: int, policy_version: int, journal: StepJournal) -> StepRollouts | None:
        """See `collect`; where it gives None, the source may have moved on."""
        step, wanted = self.begin(policy_version), self.prompts_per_step
        max_refills = 0 if self.dynamic is None else self.dynamic.max_refills
        while len(step.counting) < wanted and step.rounds <= max_refills:
            if not self.add_round(step, seed, journal):
                return None
            step.rounds += 1
            self.refuse_failures(step)
        if len(step.counting) < wanted and self.groups.is_main:
            logger.warning(
                "%d of %d groups pass the filter after --rl-max-refills %d, of %d prompts: the step trains on them",
                len(step.counting), wanted, max_refills, step.started,
            )  # fmt: skip
        return step

    def begin(self, policy_version: int) -> StepRollouts:
        """Return a step without groups, generated by weights of ``policy_version``."""
        return StepRollouts(policy_version)

    def add_round(self, step: StepRollouts, seed: int, journal: StepJournal) -> bool:
        """Draw once and have it answered, for ``step``; False when the run was asked to stop."""
        step.drawn = self.source.draw(self.prompts_per_step)
        step.started, step.counting = len(step.drawn), list(range(len(step.drawn)))
        result = self.rollouter.run(self.requests_of_this_rank(step.drawn), seed, step.policy_version, journal)
        if result is None:
            return False
        step.answered = dict(sorted(result.finished.items()))
        step.add_work(result)
        return True

    def round_size(self, step: StepRollouts, most: int) -> int:
        """Return of how many groups the share that counted so far suggests that enough will count, ``most`` at most."""
        if not step.counting:
            return most
        missing = self.prompts_per_step - len(step.counting)
        return min(most, -(-missing * len(step.drawn) // len(step.counting)))

    def requests_of_this_rank(self, drawn: Sequence[SourcedTask], first: int = 0) -> list[Request]:
        """Return this replica's groups, in the order drawn; every rank has drawn the same list.

        Ranks get about the same expected tokens, so not the same number of groups. The index of a request is its
        group's place in the step, from ``first`` on.
        """
        requests = [
            self.factory.request(source, self.group_size, number) for number, source in enumerate(drawn, start=first)
        ]
        ranks = deal(requests, self.expected_lengths, self.groups.rollout_size)
        mine = [request for request, rank in zip(requests, ranks, strict=True) if rank == self.groups.rollout_rank]
        return list(map(self.expecting, mine))

    def expecting(self, request: Request) -> Request:
        """Return ``request`` with its expected length."""
        tokens = max(1, round(self.expected_lengths.completion(request)))
        return replace(request, hints=replace(request.hints, expected_tokens=tokens))

    def refuse_failures(self, step: StepRollouts) -> None:
        """Count the failed grades of the step so far; collective over the replicas.

        Raises:
            EnvironmentFault: there are too many.
        """
        step.failures = failures_of(list(step.answered.values()), self.groups.rollout_group)
        refuse_failures(step.failures, len(step.drawn) * self.group_size, self.max_failed_share)

    def commit(self, step: StepRollouts) -> dict[str, float]:
        """Finish a step: remember lengths, and what the next step begins with; returns metrics of how it went.

        Collective over the replicas.
        """
        lengths, seconds = lengths_and_seconds(
            step.answered, step.generate_seconds, len(step.drawn), self.groups.rollout_group
        )
        self.expected_lengths.learn(zip(step.drawn, lengths, strict=True))
        if self.dynamic is None:
            return idle_metrics(seconds)
        rewards = rewards_of_all(step.answered.values(), self.groups.rollout_group, any_counts=bool(step.counting))
        return idle_metrics(seconds) | rewards | {
            "training/refills": float(step.rounds - 1),
            "training/groups_started": float(step.started),
            "training/groups_answered": float(len(step.drawn)),
            "training/counting_share": len(step.counting) / max(len(step.drawn), 1),
        }
