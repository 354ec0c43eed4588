"""Advantages on numbers worked out by hand.

One batch for all of them, groups interleaved, ``x`` masked::

    group    0   1   0   2   0   1   0   2
    reward   1   2   3   7  99   4   5   9
    masked                  x            x

Group 0 has 1, 3, 5: mean 3, variance (4 + 0 + 4) / 2 = 4, std 2.
Group 1 has 2, 4: mean 3, variance (1 + 1) / 1 = 2.
Group 2 has one valid sample, so no baseline.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms import Extension
from megatron_rl.algorithms.advantages import (
    batch_norm,
    dr_grpo,
    grpo,
    maxrl,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from megatron_rl.algorithms.groups import informative_groups
from megatron_rl.errors import ConfigError
from tests.support.tokens import one_token_a_sample, step_rewards, token_batch

GROUPS = torch.tensor([0, 1, 0, 2, 0, 1, 0, 2])
REWARDS = torch.tensor([1.0, 2.0, 3.0, 7.0, 99.0, 4.0, 5.0, 9.0])
VALID = torch.tensor([True, True, True, True, False, True, True, False])
TOKENS = torch.tensor([1, 1, 2, 2, 5, 1, 3, 5])


def run(
    advantage: Extension, rewards: torch.Tensor = REWARDS, valid: torch.Tensor = VALID, groups: torch.Tensor = GROUPS
) -> torch.Tensor:
    """Of samples of one token each."""
    advantages, _ = advantage(one_token_a_sample(step_rewards(rewards, valid, groups)))
    return advantages


def assert_advantages(actual: torch.Tensor, expected: list[float], tolerance: float = 2e-6) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=tolerance)


def test_grpo_divides_by_the_group_std() -> None:
    half = 1 / math.sqrt(2)  # group 1: -1 / sqrt(2), 1 / sqrt(2)
    expected = [-1.0, -half, 0.0, 0.0, 0.0, half, 1.0, 0.0]
    assert_advantages(run(grpo.Advantage()), expected)


def test_grpo_adds_epsilon_to_the_std() -> None:
    # Group 0: 2 / (2 + 2) = 0.5; group 1: 1 / (1.414214 + 2) = 0.292893.
    expected = [-0.5, -0.292893, 0.0, 0.0, 0.0, 0.292893, 0.5, 0.0]
    assert_advantages(run(grpo.Advantage(epsilon=2.0)), expected)


def test_dr_grpo_only_subtracts_the_group_mean() -> None:
    expected = [-2.0, -1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0]
    assert_advantages(run(dr_grpo.Advantage()), expected)


def test_rloo_leaves_the_sample_out_of_its_baseline() -> None:
    # Group 0: 1 - (3 + 5) / 2 = -3;  3 - (1 + 5) / 2 = 0;  5 - (1 + 3) / 2 = 3.  Group 1: 2 - 4, 4 - 2.
    expected = [-3.0, -2.0, 0.0, 0.0, 0.0, 2.0, 3.0, 0.0]
    assert_advantages(run(rloo.Advantage()), expected)


def test_batch_norm_takes_mean_and_std_over_all_valid_samples() -> None:
    # 1, 2, 3, 7, 4, 5, the 7 alone in its group: mean 22 / 6 = 3.666667, variance 23.333333 / 5, std 2.160247.
    expected = [-1.234427, -0.771517, -0.308607, 1.543033, 0.0, 0.154303, 0.617213, 0.0]
    assert_advantages(run(batch_norm.Advantage()), expected)


def run_of_tokens(advantage: Extension) -> torch.Tensor:
    """Of samples of as many tokens as ``TOKENS`` has."""
    return advantage(one_token_a_sample(step_rewards(REWARDS, VALID, GROUPS, advantage.BASELINE, TOKENS)))[0]


def test_reinforce_plus_plus_takes_mean_and_std_over_all_tokens() -> None:
    # 1, 2, 3 3, 7 7, 4, 5 5 5: mean 42 / 10; squares 10.24 + 4.84 + 2 * 1.44 + 2 * 7.84 + 0.04 + 3 * 0.64 = 35.6,
    # std sqrt(35.6 / 9) = 1.988858.  -3.2, -2.2, -1.2, 2.8, -0.2 and 0.8 divided by it.
    expected = [-1.608963, -1.106162, -0.603361, 1.407843, 0.0, -0.100560, 0.402241, 0.0]
    advantages = run_of_tokens(reinforce_plus_plus.Advantage())
    assert_advantages(advantages, expected)
    assert (advantages * TOKENS).sum().item() == pytest.approx(0.0, abs=1e-5)


def test_reinforce_plus_plus_with_baseline_takes_the_group_mean_first() -> None:
    # -2, -1, 0 0, 1, 2 2 2 of the groups with a signal: mean 4 / 8 over the tokens; squares 6.25 + 2.25 + 2 * 0.25 +
    # 0.25 + 3 * 2.25 = 16, std sqrt(16 / 7) = 1.511858.  -2.5, -1.5, -0.5, 0.5 and 1.5 divided by it.
    expected = [-1.653594, -0.992157, -0.330719, 0.0, 0.0, 0.330719, 0.992157, 0.0]
    advantages = run_of_tokens(reinforce_plus_plus_baseline.Advantage())
    assert_advantages(advantages, expected)
    assert (advantages * TOKENS).sum().item() == pytest.approx(0.0, abs=1e-5)


def test_reinforce_plus_plus_with_baseline_centres_each_group_by_its_own_mean() -> None:
    # Means 0.5 and 5: -0.5, 0.5, -1, 1 1, whose mean is 0.2; squares 0.49 + 0.09 + 1.44 + 2 * 0.64 = 3.3, std
    # sqrt(3.3 / 4) = 0.908295.  -0.7, 0.3, -1.2 and 0.8 divided by it.
    rewards, groups, tokens = torch.tensor([0.0, 1.0, 4.0, 6.0]), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 1, 2])
    step = step_rewards(rewards, torch.ones(4, dtype=torch.bool), groups, "group", tokens)
    advantages = reinforce_plus_plus_baseline.Advantage()(one_token_a_sample(step))[0]
    assert_advantages(advantages, [-0.770675, 0.330289, -1.321157, 0.880771])


def test_reinforce_plus_plus_adds_epsilon_to_the_std() -> None:
    # 1 and 3 of one token each: -1 and 1, std sqrt(2): 1 / (1.414214 + 1).
    two = (torch.tensor([1.0, 3.0]), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))
    for module in (reinforce_plus_plus, reinforce_plus_plus_baseline):
        assert_advantages(run(module.Advantage(epsilon=1.0), *two), [-0.414214, 0.414214])


def test_maxrl_divides_by_the_group_mean() -> None:
    # Both groups have mean 3: -2 / 3, 0, 2 / 3 and -1 / 3, 1 / 3.
    third = 1 / 3
    assert_advantages(run(maxrl.Advantage()), [-2 * third, -third, 0.0, 0.0, 0.0, third, 2 * third, 0.0])
    # Counted from -1 it is 4.
    assert_advantages(run(maxrl.Advantage(lowest=-1.0)), [-0.5, -0.25, 0.0, 0.0, 0.0, 0.25, 0.5, 0.0])


def test_maxrl_weighs_a_task_by_its_inverse_success_rate() -> None:
    # One right of four: 1 / 0.25 - 1 = 3.  Three of four: 1 / 0.75 - 1 = 1 / 3.  A wrong one: -1.  None: 0.
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    expected = [3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0]
    everything = torch.ones(12, dtype=torch.bool)
    assert_advantages(run(maxrl.Advantage(epsilon=1e-9), rewards, everything, groups), expected)
    # The same with rewards of -1 and 1, told so: (1 - -0.5) / 0.5 = 3.
    both_signs = maxrl.Advantage(epsilon=1e-9, lowest=-1.0)
    assert_advantages(run(both_signs, 2 * rewards - 1, everything, groups), expected)


def test_maxrl_refuses_a_reward_below_that_of_a_failure() -> None:
    with pytest.raises(ConfigError, match=r"lowest=0, but there is a reward of -1; use --rl-advantage-args lowest="):
        run(maxrl.Advantage(), torch.where(REWARDS == 2, -1.0, REWARDS))
    run(maxrl.Advantage(lowest=-0.1), torch.where(REWARDS == 2, -0.1, REWARDS))  # in fp32 it is below the fp64 -0.1


@pytest.mark.parametrize("group_size", [2, 3, 7, 8, 16])
def test_equal_rewards_give_exactly_no_advantage(group_size: int) -> None:
    # In fp32 the mean of eight times 0.1 is 0.1 + 7e-9, and 7e-9 / (7e-9 + 1e-6) = 0.007.
    rewards = torch.full((group_size,), 0.1)
    valid = torch.ones(group_size, dtype=torch.bool)
    advantages = run(grpo.Advantage(), rewards, valid, torch.zeros(group_size, dtype=torch.int64))
    assert advantages.tolist() == [0.0] * group_size


def test_a_masked_reward_may_be_nan() -> None:
    rewards = REWARDS.masked_fill(~VALID, torch.nan)
    for module in (grpo, dr_grpo, rloo, batch_norm, maxrl, reinforce_plus_plus, reinforce_plus_plus_baseline):
        assert torch.equal(run(module.Advantage(), rewards), run(module.Advantage()))


def test_informative_groups() -> None:
    #          group 0: 1, 0    1: 1, 1, masked 0    2: 1, masked 0    3: both masked
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3])
    valid = torch.tensor([True, True, True, True, False, True, False, False, False])
    assert informative_groups("group", rewards, valid, groups).tolist() == [True, False, False, False]
    assert informative_groups("batch", rewards, valid, groups).tolist() == [True, True, True, False]


def test_a_batch_of_equal_rewards_has_no_signal() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    valid = torch.tensor([True, True, True, False])
    assert informative_groups("batch", rewards, valid, groups).tolist() == [False, False]


def test_no_samples_have_no_advantages() -> None:
    nothing = (torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
    assert run(grpo.Advantage(), *nothing).shape == (0,)
    assert informative_groups("group", *nothing).shape == informative_groups("batch", *nothing).shape == (0,)


def test_an_epsilon_that_divides_by_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"epsilon must be above 0, got 0\.0"):
        grpo.Advantage(epsilon=0.0)


def test_every_token_has_the_advantage_of_its_sample_whatever_batch_it_is_in() -> None:
    """Samples 6 and 1 of the step, and a padding sequence: 5 - 3 and 2 - 3."""
    step = step_rewards(REWARDS, VALID, GROUPS)
    batch = token_batch([0, 0, 0, 1, 1, 2], [0, 1, 1, 0, 1, 0], step=step, sample_id=(6, 1))
    advantages, _ = dr_grpo.Advantage()(batch)
    assert advantages.tolist() == [2.0, 2.0, 2.0, -1.0, -1.0, 0.0]
