"""All optimizer updates that one rollout pays for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.trainer.accumulate import update
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome
from megatron_rl.trainer.policy_loss import (
    LossSettings,
    LossStatistics,
    PolicyLossFunction,
    ScoredBatch,
    reduce_statistics,
)
from megatron_rl.trainer.reference import ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import PackedBatch


@dataclass(frozen=True)
class TrainOutcome:
    """The result of a step's updates; equal on all ranks."""

    metrics: dict[str, float]
    skipped_updates: int
    """Updates left out because their gradient was not finite."""


class PolicyTrainer:
    """Old and reference log-probs where they are needed, then the updates."""

    def __init__(
        self,
        optimization: Optimization,
        scorer: Scorer,
        settings: LossSettings,
        iterations: int,
        reference: ReferencePolicy | None,
        data_group: dist.ProcessGroup,
        timer: PhaseTimer,
    ) -> None:
        self._optimization = optimization
        self._scorer = scorer
        self._loss = PolicyLossFunction(scorer, settings)
        self._iterations = iterations
        self._reference = reference
        self._data_group = data_group
        self._timer = timer

    def step(self, updates: Sequence[Sequence[PackedBatch]]) -> TrainOutcome:
        """Go over the rollout's updates ``grpo_iterations`` times; collective."""
        if not updates:
            return TrainOutcome({}, 0)
        # With a single update old and current log-probs are the same numbers: no pass for them.
        needs_old = len(updates) * self._iterations > 1
        scored = self._score(updates, needs_old)
        outcomes: list[UpdateOutcome] = []
        statistics: list[LossStatistics] = []
        with self._timer.phase("update_actor"):
            for _ in range(self._iterations):
                for micro_batches in scored:
                    outcome, seen = update(
                        self._optimization, micro_batches, self._forward, self._loss
                    )
                    outcomes.append(outcome)
                    statistics += seen
            metrics = reduce_statistics(
                statistics, self._data_group, self._optimization.policy.device
            )
        return TrainOutcome(
            metrics | outcome_metrics(outcomes), sum(not outcome.applied for outcome in outcomes)
        )

    def _forward(self, model: torch.nn.Module, scored: ScoredBatch) -> torch.Tensor:
        return self._scorer.forward(model, scored.batch)

    def _score(
        self, updates: Sequence[Sequence[PackedBatch]], needs_old: bool
    ) -> list[list[ScoredBatch]]:
        old = [[None for _ in update] for update in updates]
        if needs_old:
            with self._timer.phase("old_log_prob"):
                old = [[self._scorer.logprobs(batch) for batch in update] for update in updates]
        ref = [[None for _ in update] for update in updates]
        if self._reference is not None:
            with self._timer.phase("ref"), self._reference.swapped_in():
                ref = [[self._scorer.logprobs(batch) for batch in update] for update in updates]
        return [
            [ScoredBatch(*parts) for parts in zip(*columns, strict=True)]
            for columns in zip(updates, old, ref, strict=True)
        ]


def outcome_metrics(outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
    """Optimizer metrics of a step's updates: the mean norm, the last learning rate."""
    metrics = {
        "actor/grad_norm": sum(outcome.grad_norm for outcome in outcomes) / len(outcomes),
        "actor/lr": outcomes[-1].learning_rate,
        "actor/skipped_updates": float(sum(not outcome.applied for outcome in outcomes)),
    }
    zeros = [outcome.num_zeros for outcome in outcomes if outcome.num_zeros is not None]
    if zeros:
        metrics["actor/num_zeros_in_grad"] = float(sum(zeros)) / len(zeros)
    return metrics
