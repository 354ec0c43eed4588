"""What every discovered advantage, loss and correction must hold to; a new file is tested by being there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.corrections.composition import correction_modules, get_correction
from megatron_rl.algorithms.corrections.statistics import mismatch_statistics
from megatron_rl.algorithms.groups import groups_with_signal
from megatron_rl.algorithms.interfaces import AdvantageConfig, Correction, CorrectionConfig, LossConfig, PolicyLoss
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, LOSSES

LOSS_CONFIG = LossConfig(clamp_eps_lower=0.2, clamp_eps_upper=0.28, dual_clip=3.0)
MASK = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
MASKED = MASK == 0


def logprobs(seed: int) -> Tensor:
    return -3 * torch.rand(9, generator=torch.Generator().manual_seed(seed))


def run_loss(name: str, current: Tensor, old: Tensor, advantages: Tensor, mask: Tensor = MASK) -> PolicyLoss:
    return LOSSES.get(name)(current, old, advantages, mask, SEQUENCE, 3, LOSS_CONFIG)


@pytest.mark.parametrize("name", ADVANTAGES.names())
class TestAdvantages:
    rewards = torch.tensor([0.0, 1.0, 0.5, 2.0, 3.0, 1.0])
    valid = torch.tensor([True, True, True, True, True, False])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])

    def run(self, name: str, rewards: Tensor, valid: Tensor) -> Tensor:
        return ADVANTAGES.module(name).compute(rewards, valid, self.groups, AdvantageConfig())

    def test_it_says_what_it_compares_with(self, name: str) -> None:
        assert ADVANTAGES.module(name).BASELINE in ("group", "batch")
        assert ADVANTAGES.stated(name, "BASELINE") == ADVANTAGES.module(name).BASELINE

    def test_shape_dtype_and_detachment(self, name: str) -> None:
        advantages = self.run(name, self.rewards, self.valid)
        assert advantages.shape == (6,)
        assert advantages.dtype == torch.float32
        assert advantages.isfinite().all()
        assert not advantages.requires_grad

    def test_a_higher_reward_in_the_group_has_a_higher_advantage(self, name: str) -> None:
        first, second, third = self.run(name, self.rewards, self.valid)[:3].tolist()
        assert first < third < second

    def test_masked_samples_take_no_part(self, name: str) -> None:
        valid = torch.tensor([True, False, True, True, False, True])
        advantages = self.run(name, self.rewards, valid)
        changed = self.run(name, self.rewards.masked_fill(~valid, torch.nan), valid)
        assert torch.equal(advantages, changed)
        # Masked, or with a baseline of the group alone in it: 0.
        alone = [3, 5] if ADVANTAGES.module(name).BASELINE == "group" else []
        assert advantages[[1, 4, *alone]].tolist() == [0.0] * (2 + len(alone))
        assert advantages[[0, 2]].abs().min() > 0

    def test_advantages_of_the_groups_with_a_signal_add_up_to_nothing(self, name: str) -> None:
        """A baseline that left some of its samples out would move the weights also where nothing is to be learned."""
        baseline = ADVANTAGES.module(name).BASELINE
        signal = groups_with_signal(baseline, self.rewards, self.valid, self.groups)
        advantages = self.run(name, self.rewards, self.valid)
        assert advantages[signal[self.groups]].sum().item() == pytest.approx(0.0, abs=1e-6)

    def test_equal_rewards_have_no_advantage(self, name: str) -> None:
        assert self.run(name, torch.full((6,), 0.1), self.valid).tolist() == [0.0] * 6


@pytest.mark.parametrize("name", LOSSES.names())
class TestLosses:
    def test_shape_dtype_and_detached_counts(self, name: str) -> None:
        current = logprobs(0).requires_grad_()
        loss = run_loss(name, current, logprobs(1), torch.randn(9))
        assert loss.per_token.shape == (9,)
        assert loss.per_token.dtype == torch.float32
        assert loss.per_token.requires_grad
        for count in (loss.num_clipped_lower, loss.num_clipped_upper, loss.num_dual_clipped):
            assert count.shape == ()
            assert count.dtype == torch.float32
            assert not count.requires_grad
            assert 0 <= count <= MASK.sum()

    def test_nothing_passes_at_masked_positions(self, name: str) -> None:
        advantages = torch.randn(9, generator=torch.Generator().manual_seed(2))
        results = []
        for filler in (-1.0, 1e30, -torch.inf, torch.nan):
            current = logprobs(0).masked_fill(MASKED, filler).requires_grad_()
            old = logprobs(1).masked_fill(MASKED, -filler)
            loss = run_loss(name, current, old, advantages.masked_fill(MASKED, filler))
            loss.per_token.sum().backward()
            assert loss.per_token[MASKED].tolist() == [0.0] * 4
            assert current.grad[MASKED].tolist() == [0.0] * 4
            results.append((loss.per_token.detach(), current.grad))
        for value, gradient in results[1:]:
            assert torch.equal(value, results[0][0])
            assert torch.equal(gradient, results[0][1])

    def test_on_policy_it_is_the_policy_gradient(self, name: str) -> None:
        current = logprobs(0).requires_grad_()
        advantages = torch.tensor([9.0, 1.0, -2.0, 0.0, 9.0, 0.5, -1.0, 9.0, 9.0])
        run_loss(name, current, current.detach().clone(), advantages).per_token.sum().backward()
        torch.testing.assert_close(current.grad, -advantages * MASK)

    def test_extreme_ratios_stay_finite(self, name: str) -> None:
        for shift in (-500.0, 500.0):
            current = (logprobs(1) + shift).requires_grad_()
            for advantage in (-1.0, 1.0):
                loss = run_loss(name, current, logprobs(1), torch.full((9,), advantage))
                (gradient,) = torch.autograd.grad(loss.per_token.sum(), current)
                assert loss.per_token.isfinite().all()
                assert gradient.isfinite().all()

    def test_the_host_reads_nothing(self, name: str) -> None:
        # A meta tensor has no values: a read raises, where on a GPU it would make the host wait.
        current = torch.empty(9, device="meta", requires_grad=True)
        nowhere = torch.empty(9, device="meta")
        loss = LOSSES.get(name)(
            current, nowhere, nowhere, nowhere, SEQUENCE.to("meta"), 3, LOSS_CONFIG
        )
        loss.per_token.sum().backward()

    def test_nothing_to_learn_from_is_no_loss(self, name: str) -> None:
        current = logprobs(0).requires_grad_()
        loss = run_loss(name, current, logprobs(1), torch.ones(9), torch.zeros(9))
        loss.per_token.sum().backward()
        assert loss.per_token.abs().sum() == 0
        assert current.grad.abs().sum() == 0


def run_correction(name: str, old: Tensor, inference: Tensor) -> Correction:
    correction = get_correction(name)
    return correction(old, inference, MASK, SEQUENCE, 3, CorrectionConfig())


@pytest.mark.parametrize("name", [*CORRECTIONS.names(), "+".join(CORRECTIONS.names())])
class TestCorrections:
    def test_it_says_what_it_weighs(self, name: str) -> None:
        assert all(module.LEVEL in ("token", "sequence") for module in correction_modules(name))

    def test_weights_are_finite_detached_and_never_negative(self, name: str) -> None:
        old = (logprobs(0) + 500 * torch.linspace(-1, 1, 9)).requires_grad_()
        result = run_correction(name, old, logprobs(1))
        assert result.weights.shape == result.clipped.shape == (9,)
        assert result.weights.dtype == torch.float32
        assert result.clipped.dtype == torch.bool
        assert not result.weights.requires_grad
        assert result.weights.isfinite().all()
        assert (result.weights >= 0).all()

    def test_the_host_reads_nothing(self, name: str) -> None:
        nowhere = torch.empty(9, device="meta")
        correction = get_correction(name)
        result = correction(nowhere, nowhere, nowhere, SEQUENCE.to("meta"), 3, CorrectionConfig())
        statistics = mismatch_statistics(nowhere, nowhere, nowhere, result)
        assert statistics.merge(statistics).sum_tensor().is_meta

    def test_agreement_has_weight_one(self, name: str) -> None:
        result = run_correction(name, logprobs(0), logprobs(0))
        assert torch.equal(result.weights, MASK)
        assert not result.clipped.any()

    def test_masked_positions_have_weight_zero(self, name: str) -> None:
        noise = torch.full((9,), torch.nan)
        old = torch.where(MASKED, noise, logprobs(0))
        result = run_correction(name, old, torch.where(MASKED, -noise, logprobs(1)))
        assert result.weights[MASKED].tolist() == [0.0] * 4
        assert not result.clipped[MASKED].any()
        assert torch.equal(result.weights, run_correction(name, logprobs(0), logprobs(1)).weights)
