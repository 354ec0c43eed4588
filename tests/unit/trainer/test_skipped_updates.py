"""A gradient that is not finite leaves no trace in weights, momentum or schedule; three in a row end the run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.errors import TrainingError
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.progress import MAX_CONSECUTIVE_SKIPS, Progress
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.scoring import Scorer
from tests.support.samples import all_equal, own_reward, random_samples, rewards_of, tiny_optimization, weights_of
from tests.support.tokens import correction
from tests.unit.trainer.test_policy_loss import PLAIN

SAMPLES = [*random_samples(3), replace(random_samples(1)[0], reward=math.inf, sample_id=3)]
HEALTHY, POISONED = collate(SAMPLES[:3], "cpu"), collate(SAMPLES[3:], "cpu")
REWARDS = rewards_of(SAMPLES)
OPTIMIZERS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "distributed": {"use_distributed_optimizer": True},
    "clipped": {"clip_grad": 1.0},
}


def trainer_of(
    groups: ParallelGroups, optimization: Optimization, objective: PolicyObjective = PLAIN
) -> PolicyTrainer:
    scorer = Scorer(optimization.policy, groups, 1.0)
    return PolicyTrainer(optimization, scorer, own_reward, objective, 1, PhaseTimer())


def optimizer_state(optimization: Optimization) -> list[torch.Tensor]:
    """Momenta and step counters."""
    states = [
        value
        for part in optimization.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
    ]
    return [torch.as_tensor(value).clone() for value in states]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_poisoned_update_is_skipped(one_rank: ParallelGroups, kind: str) -> None:
    optimization = tiny_optimization(**OPTIMIZERS[kind])
    trainer = trainer_of(one_rank, optimization)
    assert trainer.step([[HEALTHY]], REWARDS).skipped_updates == 0
    weights, state = weights_of(optimization.policy), optimizer_state(optimization)
    assert state

    outcome = trainer.step([[HEALTHY, POISONED]], REWARDS)
    assert outcome.skipped_updates == 1
    assert not math.isfinite(outcome.metrics["actor/grad_norm"])
    assert all_equal(weights_of(optimization.policy), weights)
    assert all_equal(optimizer_state(optimization), state)

    assert trainer.step([[HEALTHY]], REWARDS).skipped_updates == 0
    assert not all_equal(weights_of(optimization.policy), weights)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_whose_every_token_is_rejected_moves_nothing(one_rank: ParallelGroups, kind: str) -> None:
    """Momentum and weight decay would; it is no gradient that is not finite, so three in a row end no run."""
    optimization = tiny_optimization(**{"weight_decay": 0.1} | OPTIMIZERS[kind])
    trainer_of(one_rank, optimization).step([[HEALTHY]], REWARDS)
    weights, state = weights_of(optimization.policy), optimizer_state(optimization)

    rejecting = trainer_of(one_rank, optimization, replace(PLAIN, correction=correction("masked_is")))
    foreign = replace(HEALTHY, inference_logprobs=HEALTHY.inference_logprobs - 9)
    outcome = rejecting.step([[foreign, foreign], [foreign], [foreign]], REWARDS)
    assert outcome.metrics["rollout_corr/rollout_is_clipped"] == 1
    assert outcome.metrics["actor/empty_updates"] == 3
    assert (outcome.applied_updates, outcome.skipped_updates) == (0, 0)
    assert all_equal(weights_of(optimization.policy), weights)
    assert all_equal(optimizer_state(optimization), state)

    outcome = trainer_of(one_rank, optimization).step([[foreign], [HEALTHY]], REWARDS)
    assert (outcome.applied_updates, outcome.metrics["actor/empty_updates"]) == (2, 0)


def test_only_the_poisoned_one_of_two_updates_is_skipped(one_rank: ParallelGroups) -> None:
    optimization = tiny_optimization()
    outcome = trainer_of(one_rank, optimization).step([[POISONED], [HEALTHY]], REWARDS)
    assert outcome.skipped_updates == 1
    assert outcome.metrics["actor/skipped_updates"] == 1.0


def test_three_in_a_row_end_the_run() -> None:
    progress = Progress()
    progress.count_updates(applied=1, skipped=0)
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        progress.count_updates(applied=0, skipped=1)
    progress.count_updates(applied=1, skipped=0)  # a good one in between starts the count again
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        progress.count_updates(applied=0, skipped=1)
    assert (progress.updates, progress.policy_version) == (2, 2)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        progress.count_updates(applied=0, skipped=1)


def test_one_bad_update_of_four_in_every_step_is_not_three_in_a_row() -> None:
    progress = Progress()
    for _ in range(2 * MAX_CONSECUTIVE_SKIPS):
        progress.count_updates(applied=3, skipped=1)
    assert (progress.updates, progress.consecutive_skips) == (6 * MAX_CONSECUTIVE_SKIPS, 0)
    with pytest.raises(TrainingError, match="4 updates in a row"):
        progress.count_updates(applied=0, skipped=4)


def test_a_step_without_updates_is_no_good_one_in_between() -> None:
    progress = Progress()
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        progress.count_updates(applied=0, skipped=1)
    progress.count_updates(applied=0, skipped=0)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        progress.count_updates(applied=0, skipped=1)
