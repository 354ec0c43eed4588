"""Generalised advantage estimation on numbers worked out by hand.

The sequence of most tests, ``.`` not written by the policy::

    token     P    A    B    .    C
    reward    0    .5   0    0    2
    value     9    1    3    7    4

so with gamma 1 the deltas are A .5 + 3 - 1 = 2.5, B 0 + 4 - 3 = 1, C 2 - 4 = -2: what lies between B and C is no step.
"""

from __future__ import annotations

import random

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.advantages import gae
from megatron_rl.algorithms.groups import informative_groups
from megatron_rl.errors import ConfigError
from tests.support.tokens import step_rewards, token_batch

MASK = [0.0, 1.0, 1.0, 0.0, 1.0]
REWARDS = [0.0, 0.5, 0.0, 0.0, 2.0]
VALUES = [9.0, 1.0, 3.0, 7.0, 4.0]
END = 6.0
"""What the critic expects after the last token."""


def of(mask: list[float] = MASK, values: list[float] = VALUES, truncated: bool = False) -> TokenBatch:
    return packed([(mask, REWARDS, values, END)], [truncated])


def packed(parts: list[tuple], truncated: list[bool]) -> TokenBatch:
    """Sequences of (mask, rewards, values, value after the end)."""
    count = torch.arange(len(parts))
    known = torch.ones(len(parts), dtype=torch.bool)
    masks, rewards, values = (torch.tensor([one for part in parts for one in part[i]]) for i in range(3))
    return token_batch(
        count.repeat_interleave(torch.tensor([len(part[0]) for part in parts])), masks,
        rewards=rewards, values=values, end_values=torch.tensor([part[3] for part in parts]),
        step=step_rewards(torch.zeros(len(parts)), known, count, "critic"), truncated=torch.tensor(truncated),
    )  # fmt: skip


def estimate(batch: TokenBatch, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns."""
    advantage = gae.Advantage(**options)
    found, sums = advantage(batch)
    assert sums == {}
    assert found.dtype == torch.float32
    return found, advantage.returns(batch, found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 2.5 + 1 - 2; 1 - 2; -2: the reward to come less the value, 2.5 - 1, 2 - 3, 2 - 4.
        pytest.param({}, [1.5, -1.0, -2.0], id="lambda 1, gamma 1"),
        pytest.param({"gae_lambda": 0.0}, [2.5, 1.0, -2.0], id="lambda 0: the deltas"),
        # 1 - .5 * 2 = 0; 2.5 + .5 * 0.
        pytest.param({"gae_lambda": 0.5}, [2.5, 0.0, -2.0], id="lambda 0.5"),
        # Deltas .5 + 1.5 - 1 = 1; 0 + 2 - 3 = -1; -2.  -1 - .5 * 2 = -2; 1 - .5 * 2 = 0.
        pytest.param({"gamma": 0.5}, [0.0, -2.0, -2.0], id="gamma 0.5"),
        # The same deltas, factor .25: -1 - .5 = -1.5; 1 - .375.
        pytest.param({"gamma": 0.5, "gae_lambda": 0.5}, [0.625, -1.5, -2.0], id="both"),
        pytest.param({"gamma": 0.0}, [-0.5, -3.0, -2.0], id="gamma 0: r - V"),
        # Three written tokens: 1 - 1 / (.5 * 3) = 1/3.  1 - 2/3; 2.5 + 1/9.
        pytest.param({"length_alpha": 0.5}, [2.5 + 1 / 9, 1 / 3, -2.0], id="adaptive"),
        pytest.param({"length_alpha": 0.05}, [2.5, 1.0, -2.0], id="adaptive, not below 0"),
    ],
)
def test_by_hand(options: dict[str, float], expected: list[float]) -> None:
    advantages, returns = estimate(of(), **options)
    written = torch.tensor(MASK) > 0
    torch.testing.assert_close(advantages[written], torch.tensor(expected))
    assert advantages[~written].tolist() == [0.0, 0.0]
    torch.testing.assert_close(returns[written], torch.tensor(expected) + torch.tensor([1.0, 3.0, 4.0]))


def test_values_may_be_trained_with_another_lambda() -> None:
    advantages, returns = estimate(of(), gae_lambda=0.0, critic_lambda=1.0)
    assert advantages[1:3].tolist() == [2.5, 1.0]
    assert returns[[1, 2, 4]].tolist() == [2.5, 2.0, 2.0], "the rewards to come"


def test_a_cut_answer_ends_with_its_reward_unless_it_is_asked_what_would_have_come() -> None:
    cut = of(truncated=True)
    assert estimate(cut)[0].tolist() == estimate(of())[0].tolist()
    # C: 2 + 6 - 4 = 4, and with gamma .5: 2 + 3 - 4.
    assert estimate(cut, bootstrap_truncated=True)[0].tolist() == [0.0, 7.5, 5.0, 0.0, 4.0]
    assert estimate(cut, bootstrap_truncated=True, gamma=0.5)[0][4] == 1.0
    assert estimate(of(), bootstrap_truncated=True)[0].tolist() == estimate(of())[0].tolist(), "it was not cut"


def test_sequences_of_a_packed_batch_know_nothing_of_each_other() -> None:
    other = ([0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.25, 0.5], 8.0)
    alone = [(MASK, REWARDS, VALUES, END), other, (MASK, REWARDS, VALUES, END)]
    options = {"gamma": 0.9, "gae_lambda": 0.8, "bootstrap_truncated": True}
    truncated = [True, True, False]
    together = estimate(packed(alone, truncated), **options)[0].split([5, 3, 5])
    for part, cut, found in zip(alone, truncated, together, strict=True):
        torch.testing.assert_close(found, estimate(packed([part], [cut]), **options)[0])


def test_masked_positions_may_hold_anything() -> None:
    hidden = torch.tensor(MASK) == 0
    values = torch.tensor(VALUES).masked_fill(hidden, torch.nan).tolist()
    assert estimate(of(values=values))[0].tolist() == estimate(of())[0].tolist()


def test_as_token_by_token() -> None:
    """Against the recursion as it is written down, on long sequences with gaps."""
    draw = random.Random(0)
    parts = []
    for length in (1, 700, 33, 1000):
        mask = [float(draw.random() < 0.7) for _ in range(length)]
        numbers = [[draw.uniform(-1, 1) for _ in range(length)] for _ in range(2)]
        parts.append((mask, [r * m for r, m in zip(numbers[0], mask, strict=True)], numbers[1], draw.uniform(-1, 1)))
    batch = packed(parts, [False, True, False, True])
    found, _ = estimate(batch, gamma=0.99, gae_lambda=0.95, bootstrap_truncated=True)
    expected: list[float] = []
    for (mask, rewards, values, end), cut in zip(parts, [False, True, False, True], strict=True):
        ahead, advantage, own = end if cut else 0.0, 0.0, []
        for written, reward, value in zip(reversed(mask), reversed(rewards), reversed(values), strict=True):
            if written:
                advantage = reward + 0.99 * ahead - value + 0.99 * 0.95 * advantage
                ahead = value
            own.append(advantage if written else 0.0)
        expected += reversed(own)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_small_factors_and_long_answers_lose_no_digits() -> None:
    """0.5 ** 4000 is below every float: a form that divides by it has no answer. 1, 1, ...: 1 / (1 - 0.5) = 2."""
    ones = torch.ones(4000, dtype=torch.float64)
    factors = torch.full_like(ones, 0.5)
    factors[-1] = 0
    sums = gae.reverse_scan(ones, factors, 4000)
    assert sums[0].item() == 2.0
    assert sums[-3:].tolist() == [1.75, 1.5, 1.0]


def test_the_first_of_seven_tokens_hears_of_the_end() -> None:
    # Values of 0: an advantage is the reward, halved for each token in between. Two doublings reach four tokens only.
    batch = packed([([0.0] + [1.0] * 7, [0.0] * 7 + [64.0], [0.0] * 8, 0.0)], [False])
    assert estimate(batch)[0].tolist() == [0.0] + [64.0] * 7
    assert estimate(batch, gamma=0.5)[0].tolist() == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


def test_large_values_take_no_digits_from_a_small_reward() -> None:
    # (1e8 - 0) + (1 - 1e8): in fp32 the second is -1e8, and the sum 0.
    batch = packed([([0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1e8], 0.0)], [False])
    assert estimate(batch)[0][1] == 1.0


def test_every_group_carries_a_signal() -> None:
    rewards, valid = torch.ones(4), torch.tensor([True, True, True, False])
    groups = torch.tensor([0, 0, 1, 2])
    assert informative_groups("critic", rewards, valid, groups).tolist() == [True, True, False]
    assert informative_groups("batch", rewards, valid, groups).tolist() == [False, False, False]


@pytest.mark.parametrize("options", [{"gamma": 1.1}, {"gae_lambda": -0.1}, {"gae_lambda": 1.5}, {"length_alpha": 0.0}])
def test_bounds(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        gae.Advantage(**options)


def test_lambda_is_given_once() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        gae.Advantage(gae_lambda=0.9, length_alpha=0.05)
