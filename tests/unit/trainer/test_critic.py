"""The critic in a step: where a value sits, its loss by hand, and who is trained when."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.advantages import gae
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.kl import with_kl_in_reward
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.weights import first_critic
from megatron_rl.trainer.critic import Critic, ValueScorer, before, value_loss, value_metrics, whiten
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.policy import PolicyTrainer, ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from tests.support.samples import all_equal, make_sample, random_samples, rewards_of, weights_of
from tests.support.tiny import tiny_config, tiny_policy
from tests.support.tokens import token_batch
from tests.unit.trainer.test_policy_loss import PLAIN

CPU = torch.device("cpu")


class Setup:
    """A policy and its critic, whose head says something."""

    def __init__(self, groups: ParallelGroups, reward_kl_beta: float = 0.0, **options: object) -> None:
        config = tiny_config(rl_advantage="gae", clip_grad=0.0, train_iters=100, rl_critic_lr=3e-2)
        self.policy = Optimization(tiny_policy(config), config)
        self.critic = Critic(
            first_critic(config, self.policy.policy, groups), None, config.critic.rl_critic_clip_range
        )
        model = self.critic.optimization.policy
        with torch.no_grad():
            model.gpt.output_layer.weight.copy_(torch.linspace(-1, 1, config.model.hidden_size)[None])
        self.critic = replace(self.critic, scorer=ValueScorer(model, groups))
        reference = ReferencePolicy(self.policy.policy) if reward_kl_beta else None
        self.trainer = PolicyTrainer(
            self.policy, Scorer(self.policy.policy, groups, 1.0), gae.Advantage(**options),
            replace(PLAIN, reward_kl_beta=reward_kl_beta), 1, PhaseTimer(), reference, None, self.critic,
        )  # fmt: skip

    def values(self, samples: list[Sample]) -> TokenBatch:
        ((batch,),) = self.critic.with_values([[collate(samples, "cpu")]])
        return batch


def test_the_trunk_is_the_policys_and_the_head_is_zero(one_rank: ParallelGroups) -> None:
    config = tiny_config(rl_advantage="gae")
    policy = tiny_policy(config)
    critic = first_critic(config, policy, one_rank).policy
    own = dict(critic.named_parameters())
    assert own.pop("output_layer.weight").abs().sum() == 0
    weights = dict(policy.named_parameters())
    assert own.keys() == weights.keys() - {"output_layer.weight"}
    for name, parameter in own.items():
        assert torch.equal(parameter, weights[name]), name
        assert parameter.data_ptr() != weights[name].data_ptr()


def test_a_value_is_what_was_expected_before_its_token(one_rank: ParallelGroups) -> None:
    """Another token changes the values after it, not its own nor those of other samples."""
    setup = Setup(one_rank)
    samples = [make_sample([3, 5, 7, 9]), make_sample([4, 6, 8], sample_id=1)]
    first = setup.values(samples)
    changed = setup.values([make_sample([3, 5, 11, 9]), samples[1]])
    assert (first.values != changed.values).tolist() == [False, False, False, True, False, False, False]
    assert (first.critic.end_values != changed.critic.end_values).tolist() == [True, False]
    assert first.values[[0, 4]].tolist() == [0.0, 0.0], "nothing was expected before the first token"
    alone = setup.values([samples[1]])
    torch.testing.assert_close(first.values[4:], alone.values)
    torch.testing.assert_close(first.critic.end_values[1:], alone.critic.end_values)
    longer = setup.values([make_sample([3, 5, 7, 9, 1])])
    assert longer.values[4].item() == pytest.approx(first.critic.end_values[0].item(), abs=1e-6)


def test_the_shift(one_rank: ParallelGroups) -> None:
    batch = collate([make_sample([3, 5, 7]), make_sample([4, 6])], "cpu")
    assert before(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), batch).tolist() == [0.0, 1.0, 2.0, 0.0, 4.0]


def test_the_value_loss_by_hand() -> None:
    """Clip range 0.5; old value 1, returns 3, 3, 0, 1, 5 and one masked.

    New values 2: (2 - 3)^2 = 1, clipped to 1.5: 2.25. 1.25: within the range, 3.0625 either way. -1: 1, clipped to .5:
    .25, so 1. 1: 0. 3: 4, clipped to 1.5: 12.25. Half of the sum of 2.25, 3.0625, 1, 0 and 12.25 is 9.28125.
    """
    new = torch.tensor([2.0, 1.25, -1.0, 1.0, 3.0, torch.nan], requires_grad=True)
    batch = token_batch(
        [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0],
        values=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, torch.nan]),
        returns=torch.tensor([3.0, 3.0, 0.0, 1.0, 5.0, torch.nan]),
    )  # fmt: skip
    total, tokens, sums = value_loss(new, batch, 0.5)
    assert total.item() == 9.28125
    assert tokens.item() == 5
    assert sums["critic/vf_clipfrac"].item() == 2
    assert sums["critic/vpred_mean"].item() == 6.25
    total.backward()
    # The clipped ones are held; the others have V - R.
    assert new.grad.tolist() == [0.0, -1.75, -1.0, 0.0, 0.0, 0.0]


def test_whitening_is_over_all_batches_of_the_step(one_rank: ParallelGroups) -> None:
    """1, 3 and 8, not the masked 99: mean 4, squares 9 + 1 + 16 = 26, std sqrt(13)."""
    first = token_batch([0, 0, 0], [0, 1, 1], advantages=torch.tensor([99.0, 1.0, 3.0]))
    second = token_batch([0], [1], advantages=torch.tensor([8.0]))
    ((one,), (two,)) = whiten([[first], [second]], one_rank, CPU, 0.0)
    assert one.advantages.tolist() == pytest.approx([0.0, -3 / math.sqrt(13), -1 / math.sqrt(13)])
    assert two.advantages.tolist() == pytest.approx([4 / math.sqrt(13)])
    ((one,), _) = whiten([[first], [second]], one_rank, CPU, 1.0)
    assert one.advantages[1].item() == pytest.approx(-3 / (math.sqrt(13) + 1))


def test_explained_variance_by_hand(one_rank: ParallelGroups) -> None:
    """Returns 1, 3, 5, 7: variance 5. Values 1, 1, 5, 5 leave 0, 2, 0, 2: variance 1."""
    parts = [
        token_batch([0, 0, 0], [1, 0, 1], returns=torch.tensor([1.0, 50.0, 3.0]), values=torch.tensor([1.0, 9.0, 1.0])),
        token_batch([0, 0], [1, 1], returns=torch.tensor([5.0, 7.0]), values=torch.tensor([5.0, 5.0])),
    ]
    metrics = value_metrics([[parts[0]], [parts[1]]], one_rank, CPU)
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.8)
    assert metrics["critic/values/mean"] == 3.0
    assert metrics["critic/returns/mean"] == 4.0


def test_kl_in_the_reward_by_hand() -> None:
    """0.5 x (old - reference): 0.5 x (-1 + 2) and 0.5 x (-3 + 1); a log-prob that is not finite costs nothing."""
    batch = token_batch(
        [0, 0, 0, 0], [0, 1, 1, 1],
        rewards=torch.tensor([0.0, 0.0, 0.0, 1.0]),
        old_logprobs=torch.tensor([7.0, -1.0, -3.0, -torch.inf]), ref_logprobs=torch.tensor([9.0, -2.0, -1.0, -1.0]),
    )  # fmt: skip
    penalised, sums = with_kl_in_reward(batch, 0.5)
    assert penalised.rewards.tolist() == [0.0, -0.5, 1.0, 1.0]
    assert sums["actor/reward_kl_penalty"].tolist() == [0.0, 1.0, -2.0, 0.0]


def test_the_critic_learns_what_is_to_come(one_rank: ParallelGroups) -> None:
    """One sample is worth 1 and another -1: from their first written token on the values say so."""
    setup = Setup(one_rank)
    good, bad = random_samples(2, seed=3)
    samples = [replace(good, reward=1.0), replace(bad, reward=-1.0)]
    before_it = weights_of(setup.policy.policy)
    for _ in range(40):
        outcome = setup.trainer.step([[collate(samples, "cpu")]], rewards_of(samples), critic_alone=True)
    assert all_equal(weights_of(setup.policy.policy), before_it), "the policy was to stay as it is"
    assert "actor/pg_loss" not in outcome.metrics
    assert (outcome.critic_updates, outcome.skipped_updates) == (1, 0)
    batch = setup.values(samples)
    written = torch.where(batch.in_loss, batch.values, torch.nan).split(batch.packing.lengths)
    assert written[0].nanmean() > 0.8
    assert written[1].nanmean() < -0.8
    assert outcome.metrics["critic/vf_explained_var"] > 0.8
    assert outcome.metrics["critic/lr"] > outcome.metrics.get("actor/lr", 0)


def test_what_was_better_than_expected_gets_likelier(one_rank: ParallelGroups) -> None:
    """The whole way from values to the policy's weights has the right sign."""
    setup = Setup(one_rank, whiten=False)
    with torch.no_grad():
        setup.critic.optimization.policy.gpt.output_layer.weight.zero_()
    good, bad = random_samples(2, seed=3)
    samples = [replace(good, reward=1.0), replace(bad, reward=-1.0)]
    batch = collate(samples, "cpu")
    start = setup.trainer.scorer.logprobs([batch])[0] * batch.loss_mask
    for _ in range(3):
        outcome = setup.trainer.step([[batch]], rewards_of(samples))
    gain = (setup.trainer.scorer.logprobs([batch])[0] * batch.loss_mask - start).split(batch.packing.lengths)
    assert gain[0].sum() > 0.1
    assert gain[1].sum() < -0.1
    assert (outcome.critic_updates, outcome.skipped_updates) == (1, 0)


def test_kl_in_the_reward_reaches_the_advantages(one_rank: ParallelGroups) -> None:
    """The reference is the policy itself at first; once the policy has moved, the penalty is there."""
    setup = Setup(one_rank, 0.5, whiten=False, gae_lambda=0.9, critic_lambda=1.0)
    samples = random_samples(3, seed=4)
    step = rewards_of(samples)
    first = setup.trainer.step([[collate(samples, "cpu")]], step).metrics
    second = setup.trainer.step([[collate(samples, "cpu")]], step)
    assert first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    kl = second.metrics["actor/reward_kl_penalty"]
    assert abs(kl) > 1e-3
    ((batch,),) = second.updates
    tokens = batch.loss_mask.sum().item()
    told = torch.where(batch.in_loss, batch.old_logprobs - batch.ref_logprobs, 0.0).sum().item() / tokens
    assert kl == pytest.approx(told, rel=1e-5)
    assert second.metrics["actor/kl_loss"] != 0
    # The critic's lambda is 1: the return of the first written token is all that comes, reward less penalty.
    rewards = torch.where(batch.in_loss, batch.rewards - 0.5 * (batch.old_logprobs - batch.ref_logprobs), 0.0)
    for sample, part in enumerate(rewards.split(batch.packing.lengths)):
        place = batch.packing.cu_seqlens[sample] + samples[sample].loss_mask.int().argmax()
        assert batch.critic.returns[place].item() == pytest.approx(part.sum().item(), abs=1e-5)
