"""The first update's forward pass gives its old log-probs: the same numbers as a pass of their own, one pass less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_rl.algorithms import Terms, TokenBatch
from megatron_rl.algorithms.advantages import batch_norm
from megatron_rl.algorithms.extension import advantage_of
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.routing import BalanceLosses
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.registry import ADVANTAGES
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.teacher import DistillationAdvantage
from tests.support.samples import random_samples, rewards_of, tiny_optimization
from tests.support.tiny import SHAPES, tiny_config, tiny_policy
from tests.unit.trainer.test_policy_loss import PLAIN

FIRST = random_samples(5, seed=1)
ALL = [*FIRST, *(replace(sample, sample_id=5 + sample.sample_id) for sample in random_samples(6, seed=2))]
UPDATES = [
    [collate(ALL[:2], "cpu"), collate(ALL[2:5], "cpu")], [collate(ALL[5:8], "cpu")], [collate(ALL[8:], "cpu")],
]  # fmt: skip


class Reading(batch_norm.Advantage):
    """An extension of a user: nobody knows whether it reads old log-probs."""


def steps(
    groups: ParallelGroups, advantage: Any, updates: list = UPDATES, iterations: int = 1, **changes: object
) -> tuple[int, list[dict[str, float]], list[torch.Tensor]]:
    """Forward passes of two steps, their metrics, and the weights after them."""
    config = tiny_config(**changes)
    optimization = Optimization(tiny_policy(config), config)
    policy, passes = optimization.policy, []
    policy.gpt.register_forward_pre_hook(lambda *_: passes.append(1))
    scorer = Scorer(policy, groups, 0.9, config.kernels.rl_fused_output_layer, BalanceLosses.of(config, policy.device))
    objective = PolicyObjective.of(config)
    trainer = PolicyTrainer(optimization, scorer, advantage, objective, iterations, PhaseTimer())
    metrics = [trainer.step(updates, rewards_of(ALL)).metrics for _ in range(2)]
    return len(passes), metrics, [parameter.detach().clone() for parameter in policy.parameters()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("changes", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_the_numbers_of_a_pass_of_its_own(one_rank: ParallelGroups, shape: str, changes: dict) -> None:
    passes, metrics, weights = steps(one_rank, batch_norm.Advantage(), **SHAPES[shape] | changes)
    all_passes, expected, known = steps(one_rank, Reading(), **SHAPES[shape] | changes)
    assert (passes, all_passes) == (2 * (2 + 4), 2 * (4 + 4))
    assert metrics == expected and metrics[0]["actor/ppo_kl"] != 0.0
    assert all(map(torch.equal, weights, known))


@pytest.mark.parametrize(
    ("updates", "iterations", "passes"),
    [
        pytest.param(UPDATES[:1], 1, 2, id="one update"),
        pytest.param(UPDATES[:1], 2, 2 * 2, id="once more: no pass but those of updates"),
        pytest.param(UPDATES, 2, 2 + 2 * 4, id="several, once more"),
        pytest.param([[], *UPDATES[1:]], 2, 2 + 2 * 2, id="a rank without micro-batches"),
    ],
)
def test_later_iterations_see_the_log_probs_of_the_first(
    one_rank: ParallelGroups, updates: list, iterations: int, passes: int
) -> None:
    counted, metrics, weights = steps(one_rank, batch_norm.Advantage(), updates, iterations)
    _, expected, known = steps(one_rank, Reading(), updates, iterations)
    assert counted == 2 * passes
    assert metrics == expected
    assert all(map(torch.equal, weights, known))


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {"rl_fused_output_layer": True},
        {"grpo_entropy_term_weight": 0.01, "rl_correction": "token_tis"},
        {"rl_policy_loss": "kl_cov", "rl_policy_loss_args": "share=0.1"},
        {"rl_policy_loss": "gspo", "rl_loss_aggregation": "sequence-mean", "clip_grad": 0.1},
    ],
    ids=lambda changes: next(iter(changes.values())),
)  # fmt: skip
def test_whatever_else_an_update_does(one_rank: ParallelGroups, changes: dict) -> None:
    _, metrics, weights = steps(one_rank, batch_norm.Advantage(), **changes)
    _, expected, known = steps(one_rank, Reading(), **changes)
    assert metrics == expected
    assert all(map(torch.equal, weights, known))


def test_what_reads_them_earlier_has_them(one_rank: ParallelGroups) -> None:
    """A user's function, and a teacher in the advantage; `test_critic.py` has KL in the reward."""
    seen: list[bool] = []

    def advantage(batch: TokenBatch) -> Terms:
        seen.append(batch.old_logprobs is not None)
        return batch.of_samples(batch.step.rewards), {}

    steps(one_rank, advantage)
    assert all(seen) and len(seen) == 2 * 4
    own = batch_norm.Advantage()
    taught = DistillationAdvantage(of_rewards=own, weight=1.0, reward_weight=1.0)
    optimization = tiny_optimization()
    trainer = PolicyTrainer(optimization, Scorer(optimization.policy, one_rank, 1.0), own, PLAIN, 1, PhaseTimer())
    for name in ADVANTAGES.names():
        made = advantage_of(tiny_config(rl_advantage=name))
        assert not replace(trainer, advantage=made).needs_old_logprobs
    assert replace(trainer, advantage=taught).needs_old_logprobs
