"""Partial rollouts: a step ends when enough groups are generated, and the others go on in the next step.

    groups in flight    a a | b b b b      a: unfinished after the step before, b: drawn now
    this step           ✓ ✓   ✓ ✓ . .      --grpo-prompts-per-step of them are generated, and trained on
    the next step           . . | c c c c  the others keep their tokens and go on with newer weights

Which groups are generated first, a replica sees at the steps of its own engine. No clock and no other replica has a
part in it, so a step that is done again has the same groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron_rl.inference.engine import Engine
from megatron_rl.platform.collectives import gather_json, gather_vectors
from megatron_rl.rollout.journal import Record, Records, asked_of, completion_of, described
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, deal
from megatron_rl.types import Completed, Request, RolloutGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartialRollouts:
    """How far generation may run ahead."""

    at_once: int
    """Groups in flight."""
    lag: int
    """Steps by which the oldest token of a sample that is trained on may be behind, 1 or more."""
    finishes: bool
    """Groups are generated before they are too old; else those that are too old are dropped."""

    def due(self, requests: Sequence[Request], policy_version: int, wanted: int) -> set[int]:
        """Places of those of the ``requests`` that must be among the ``wanted`` ones of this step.

        A group may be used in as many later steps as its lag leaves it. Each of them takes ``wanted`` groups: where
        more have to be used by then, the oldest of them are due now. That is at most ``wanted`` as long as no more
        than ``wanted`` x (``lag`` + 1) groups are in flight; then the youngest are in time whoever goes now.
        """
        if not self.finishes:
            return set()
        begun = [oldest_version(request, policy_version) for request in requests]
        order, count = sorted(range(len(begun)), key=lambda place: (begun[place], place)), 0
        for number, place in enumerate(order, start=1):
            if begun[place] == max(begun):
                break
            later_steps = self.lag - (policy_version - begun[place])
            count = max(count, number - wanted * later_steps)
        return set(order[: min(count, wanted)])


def oldest_version(request: Request, policy_version: int) -> int:
    """The version of the oldest token of its samples; ``policy_version`` where there is none."""
    return min((sample.stretches[0][0] for sample in request.begun if sample.token_ids), default=policy_version)


def is_generated(request: Request) -> bool:
    """All its samples are finished."""
    return bool(request.begun) and all(sample.finish_reason is not None for sample in request.begun)


@dataclass
class Share:
    """What one replica has to generate in a step; the rest stays unfinished."""

    requests: Sequence[Request]
    """This replica's part of the groups in flight."""
    due: set[int]
    """Indices of those that must be generated."""
    others: int
    """How many besides, the first ones."""
    unfinished: list[Request] = field(default_factory=list)

    def take(self, done: Iterable[Completed], engine: Engine) -> list[Completed]:
        """Those of the generated groups that the step takes; once there are enough of them, ``engine`` is stopped."""
        taken = []
        for request, completions in sorted(done, key=lambda completed: completed[0].index):
            if request.index in self.due or self.others > 0:
                self.others -= request.index not in self.due
                self.due.discard(request.index)
                taken.append((request, completions))
            else:  # generated while what is due was not
                self.unfinished.append(replace(request, begun=completions))
        if not self.due and not self.others and engine.has_unfinished:
            self.unfinished += engine.interrupt()
        return taken


def share_of(
    requests: Sequence[Request], due: set[int], wanted: int, expected: ExpectedLengths, rank: int, num_ranks: int
) -> Share:
    """What replica ``rank`` has to generate: about as many tokens as the others, of what is due and of the rest."""
    old = [request for request in requests if request.index in due]
    rest = [request for request in requests if request.index not in due]
    ranks_of_old, ranks_of_rest = deal(old, expected, num_ranks), deal(rest, expected, num_ranks)
    own_old = [request for request, place in zip(old, ranks_of_old, strict=True) if place == rank]
    own_rest = [request for request, place in zip(rest, ranks_of_rest, strict=True) if place == rank]
    # Of the rest a replica gives what its groups are of all, counted in the order of the replicas: sums are exact.
    left, count = wanted - len(due), max(1, len(rest))
    before = sum(place < rank for place in ranks_of_rest)
    others = left * (before + len(own_rest)) // count - left * before // count
    return Share(own_old + own_rest, {request.index for request in own_old}, others)


class UnfinishedGroups(Records):
    """The groups in flight between two steps."""

    def requests(self, source: PromptSource, factory: RequestFactory, group_size: int) -> list[Request]:
        """What goes on, the oldest draws first, numbered from 0. Left out is what does not fit the run any more."""
        found: list[Request] = []
        for record in self._records:
            environment, task_id, epoch, *_ = record["asked"]
            drawn = source.find(environment, task_id, epoch)
            if drawn is not None:
                begun = tuple(map(completion_of, record["samples"]))
                request = replace(factory.request(drawn, group_size, len(found)), begun=begun)
                longest = max((len(s.token_ids) for s in begun if s.finish_reason is None), default=0)
                if asked_of(request) == record["asked"] and longest < request.sampling.max_new_tokens:
                    found.append(request)
        if len(found) < len(self._records):
            logger.warning(
                "%d of %d groups that were begun are dropped: the task, --grpo-group-size or --rl-max-new-tokens is "
                "another one now", len(self._records) - len(found), len(self._records),
            )  # fmt: skip
        return found

    def turn_over(self, records: Sequence[Record]) -> None:
        """The step is finished, and ``records`` go on in the next."""
        self._records = list(records)


def gathered(share: Share, finished: Iterable[int], replicas: dist.ProcessGroup) -> tuple[list[int], list[Record]]:
    """Indices of the groups that are generated, and records of those unfinished, of all replicas; collective."""
    own = [[r.index, {"asked": asked_of(r), "samples": list(map(described, r.begun))}] for r in share.unfinished]
    parts = gather_json([list(finished), own], replicas)
    records = sorted((entry for _, part in parts for entry in part), key=lambda entry: entry[0])
    return sorted(index for indices, _ in parts for index in indices), [record for _, record in records]


def lag_metrics(
    groups: Sequence[RolloutGroup], policy_version: int, replicas: dist.ProcessGroup
) -> dict[str, float]:
    """How many of the tokens are of older weights, and by how many steps; over all replicas."""
    lags = [
        (policy_version - version, size)
        for group in groups for rollout in group.rollouts for completion in rollout.completions
        for version, size in completion.stretches
    ]  # fmt: skip
    local = torch.tensor([
        sum(size for _, size in lags),
        sum(size for lag, size in lags if lag > 0),
        sum(lag * size for lag, size in lags),
        max((lag for lag, size in lags if size), default=0),
    ])
    tokens, stale, total, largest = torch.stack(gather_vectors(local, replicas)).unbind(1)
    return {
        "rollout/stale_token_share": float(stale.sum() / tokens.sum().clamp_min(1)),
        "rollout/token_lag_mean": float(total.sum() / stale.sum().clamp_min(1)),
        "rollout/token_lag_max": float(largest.max()),
    }
