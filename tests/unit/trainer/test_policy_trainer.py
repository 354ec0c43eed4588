"""Which log-probs are fixed when, and which passes are left out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.advantages import batch_norm, grpo
from megatron_rl.algorithms.extension import Function
from megatron_rl.algorithms.objective import MicroLoss, PolicyObjective
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.policy import PolicyTrainer, ReferencePolicy
from megatron_rl.trainer.samples import SampleBuilder
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import RolloutGroup
from tests.support.rollouts import graded_group
from tests.support.samples import own_reward, random_samples, rewards_of, tiny_optimization
from tests.unit.trainer.test_policy_loss import PLAIN

FIRST = random_samples(3, seed=1)
BOTH = [*FIRST, *(replace(sample, sample_id=3 + sample.sample_id) for sample in random_samples(4, seed=2))]
UPDATES = [[collate(BOTH[:3], "cpu")], [collate(BOTH[3:], "cpu")]]
REWARDS = rewards_of(BOTH)


@dataclass(frozen=True, kw_only=True)
class Remembering(PolicyObjective):
    """What it is of, is kept."""

    given: list[TokenBatch] = field(default_factory=list)

    def __call__(self, batch: TokenBatch) -> MicroLoss:
        self.given.append(batch)
        return super().__call__(batch)


class Setup:
    """A trainer that remembers what its objective was given."""

    def __init__(
        self,
        groups: ParallelGroups,
        iterations: int = 1,
        objective: PolicyObjective = PLAIN,
        with_reference: bool = False,
        advantage: Function = own_reward,
    ) -> None:
        self.optimization: Optimization = tiny_optimization(train_iters=100)
        self.scorer = Scorer(self.optimization.policy, groups, 1.0)
        self.timer = PhaseTimer()
        reference = ReferencePolicy(self.optimization.policy) if with_reference else None
        remembering = Remembering(**vars(objective))
        self.given = remembering.given
        self.trainer = PolicyTrainer(
            self.optimization, self.scorer, advantage, remembering, iterations, self.timer, reference,
        )  # fmt: skip

    def phases(self) -> set[str]:
        return {name.removeprefix("timing_s/") for name in self.timer.collect()}


def test_one_update_needs_no_old_and_no_reference_pass(one_rank: ParallelGroups) -> None:
    setup = Setup(one_rank)
    setup.trainer.step(UPDATES[:1], REWARDS)
    assert [scored.old_logprobs for scored in setup.given] == [None]
    assert [scored.ref_logprobs for scored in setup.given] == [None]
    assert setup.phases() == {"update_actor"}


@pytest.mark.parametrize(
    ("iterations", "updates", "passes"),
    [
        pytest.param(1, UPDATES[:1], 1, id="old and current are the same numbers"),
        pytest.param(2, UPDATES[:1], 1 + 2, id="again with the policy moved"),
        pytest.param(1, UPDATES, 2 + 2, id="the second update sees a moved policy"),
    ],
)
def test_passes_over_the_model(
    one_rank: ParallelGroups, iterations: int, updates: list, passes: int
) -> None:
    """Counted where nothing can hide: at the model itself."""
    setup = Setup(one_rank, iterations)
    seen: list[int] = []
    gpt = setup.optimization.policy.gpt
    gpt.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].numel()))
    setup.trainer.step(updates, REWARDS)
    tokens = sum(batch.samples.token_ids.numel() for (batch,) in updates)
    assert len(seen) == passes
    assert sum(seen) == tokens * passes / len(updates)


@pytest.mark.parametrize(("iterations", "updates"), [(1, UPDATES), (2, UPDATES), (1, UPDATES[:1])])
def test_what_is_drawn_exactly_is_not_scored_before(one_rank: ParallelGroups, iterations: int, updates: list) -> None:
    """Old log-probs are the rollouts'; the first update's come from its own pass, where the mismatch would show."""
    setup = Setup(one_rank, iterations, advantage=batch_norm.Advantage())
    setup.trainer = replace(setup.trainer, rollout_is_exact=True)
    seen: list[int] = []
    setup.optimization.policy.gpt.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    setup.trainer.step(updates, REWARDS)
    assert len(seen) == iterations * len(updates)
    assert setup.phases() == {"update_actor"}
    for index, scored in enumerate(setup.given):
        if index % len(updates):
            assert torch.equal(scored.old_logprobs, scored.inference_logprobs)
        elif iterations == 1:
            assert scored.old_logprobs is None
        else:
            assert torch.equal(scored.old_logprobs, setup.given[0].current_logprobs)


def test_groups_without_signal_never_reach_the_model(one_rank: ParallelGroups) -> None:
    """From graded groups on, as the loop goes: one group with a signal, two without."""
    setup = Setup(one_rank, advantage=grpo.Advantage())
    seen: list[int] = []
    setup.optimization.policy.gpt.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    builder = SampleBuilder("group", False, one_rank)
    batches = BatchBuilder(64, 1, torch.device("cpu"), one_rank)

    def step(rollouts: list[RolloutGroup]) -> None:
        samples, rewards = builder.build(rollouts, range(len(rollouts)), 0)
        setup.trainer.step(batches.updates(samples, 64, seed=1), rewards)

    useful = graded_group([0.0, 1.0], lengths=[2, 3])
    step([graded_group([1.0, 1.0]), useful, graded_group([0.0, 0.0])])
    assert seen == [2 * len(useful.prompt_ids) + 2 + 3]
    step([graded_group([1.0, 1.0])])
    assert len(seen) == 1, "a step without any signal makes no pass"


@pytest.mark.parametrize(("iterations", "updates"), [(2, UPDATES[:1]), (1, UPDATES), (2, UPDATES)])
def test_old_logprobs_are_those_before_the_first_update(
    one_rank: ParallelGroups, iterations: int, updates: list
) -> None:
    setup = Setup(one_rank, iterations)
    before = [setup.scorer.logprobs([batch])[0] for (batch,) in updates]
    outcome = setup.trainer.step(updates, REWARDS)
    assert len(setup.given) == iterations * len(updates)
    for index, scored in enumerate(setup.given):
        assert scored.samples is updates[index % len(updates)][0].samples
        assert torch.equal(scored.old_logprobs, before[index % len(updates)])
    # The first update sees the old policy itself, the last one a policy that has moved away from it.
    torch.testing.assert_close(setup.given[0].current_logprobs.detach(), setup.given[0].old_logprobs)
    assert (setup.given[-1].current_logprobs.detach() - setup.given[-1].old_logprobs).abs().max() > 1e-3
    assert outcome.metrics["actor/ppo_kl"] != 0.0
    assert setup.phases() == {"old_log_prob", "update_actor"}


def test_reference_logprobs_are_those_of_the_start_of_the_run(one_rank: ParallelGroups) -> None:
    setup = Setup(one_rank, objective=replace(PLAIN, kl_beta=0.1), with_reference=True)
    start = setup.scorer.logprobs([UPDATES[0][0]])[0]
    first = setup.trainer.step(UPDATES[:1], REWARDS).metrics["actor/kl_loss"]
    for _ in range(3):
        last = setup.trainer.step(UPDATES[:1], REWARDS).metrics["actor/kl_loss"]
    assert all(torch.equal(scored.ref_logprobs, start) for scored in setup.given)
    assert first == pytest.approx(0.0, abs=1e-9)  # no distance before the first update
    assert last > 1e-4
    assert "ref" in setup.phases()


def test_an_update_raises_the_probability_of_what_was_good(one_rank: ParallelGroups) -> None:
    """The whole way from advantage to weights has the right sign."""
    setup = Setup(one_rank)
    good, bad = random_samples(2, seed=3)
    samples = [replace(good, reward=1.0), replace(bad, reward=-1.0)]
    batch = collate(samples, "cpu")
    before = setup.scorer.logprobs([batch])[0] * batch.loss_mask
    for _ in range(3):
        setup.trainer.step([[batch]], rewards_of(samples))
    gain = (setup.scorer.logprobs([batch])[0] * batch.loss_mask - before).split(batch.packing.lengths)
    assert gain[0].sum() > 0.1
    assert gain[1].sum() < -0.1


def test_no_updates_at_all(one_rank: ParallelGroups) -> None:
    outcome = Setup(one_rank).trainer.step([], REWARDS)
    assert (outcome.metrics, outcome.skipped_updates) == ({}, 0)


def test_advantages_are_made_after_scoring_and_may_differ_from_token_to_token(one_rank: ParallelGroups) -> None:
    """A reward to go of the token-level rewards, less a penalty from the log-probs: what GAE needs is there."""
    seen: list[TokenBatch] = []

    def reward_to_go(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(batch)
        rewards = batch.rewards - 0.1 * torch.where(batch.in_loss, batch.old_logprobs - batch.ref_logprobs, 0.0)
        parts = [part.flip(0).cumsum(0).flip(0) for part in rewards.split(batch.packing.lengths)]
        return torch.cat(parts), {"mine/reward": batch.rewards}

    setup = Setup(one_rank, 2, with_reference=True, advantage=reward_to_go)
    outcome = setup.trainer.step(UPDATES, REWARDS)
    assert len(seen) == 2, "once a step, not once a pass"
    for given in setup.given:
        first = given.packing.position_ids == 0
        # Nothing has moved yet when the penalty is taken: the reward to go of a sequence is its reward.
        own = torch.tensor([REWARDS.rewards[i] for i in given.samples.sample_id])
        torch.testing.assert_close(given.advantages[first], own)
    tokens = sum(batch.loss_mask.sum() for (batch,) in UPDATES)
    assert outcome.metrics["mine/reward"] == pytest.approx(float(REWARDS.rewards.sum() / tokens), abs=1e-6)


def test_metrics_of_advantages_are_over_samples(one_rank: ParallelGroups) -> None:
    metrics = Setup(one_rank).trainer.step(UPDATES, REWARDS).metrics
    assert metrics["critic/advantages/mean"] == REWARDS.rewards.mean().item()
    assert metrics["critic/advantages/max"] == REWARDS.rewards.max().item()
    assert metrics["critic/advantages/min"] == REWARDS.rewards.min().item()
