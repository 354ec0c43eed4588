"""Rewards by turn, on numbers worked out by hand.

One task, three samples; rewards of their turns with a discount of 0.5::

    sample    turns        returns
    0         1  2         2    2         1 + 0.5 x 2
    1         0  4  4      3    6  4      0 + 0.5 x 6, 4 + 0.5 x 4
    2         4            4

Turn 0 has the returns 2, 3, 4, of mean 3 and std 1; turn 1 has 2 and 6, of mean 4; turn 2 has one, without a baseline.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.advantages import batch_norm, dr_grpo, gae, grpo, rloo
from megatron_rl.algorithms.batch import StepRewards
from megatron_rl.algorithms.turns import StepTurns, by_turn
from tests.support.tokens import token_batch

ROWS = [
    (0, 0, 0, 1.0, 1), (0, 0, 1, 2.0, 2), (1, 0, 0, 0.0, 1), (1, 0, 1, 4.0, 1), (1, 0, 2, 4.0, 1), (2, 0, 0, 4.0, 1)
]  # fmt: skip
TASK = torch.zeros(3, dtype=torch.int64)
#              P   A0  .   B0  B1 | P   C   .   D   E | P   F   P's and . are read
TURN = torch.tensor([-1, 0, -1, 1, 1, -1, 2, -1, 3, 4, -1, 5])
SEQUENCE = [0] * 5 + [1] * 5 + [2] * 2


def batch(discount: float = 0.5, baseline: str = "group", **further: object) -> TokenBatch:
    everything = torch.ones(3, dtype=torch.bool)
    sums = torch.tensor([3.0, 8.0, 4.0])
    step = StepRewards(sums, everything, TASK, everything[:1], everything, torch.ones(3).long())
    turns = StepTurns.of(ROWS[::-1], TASK, discount).rewards(step, baseline)
    step = replace(step, turns=turns)
    return by_turn(token_batch(SEQUENCE, (TURN >= 0).float(), turn=TURN, step=step, **further))


def by_hand(found: torch.Tensor) -> list[float]:
    """The advantages of A0, B0, B1, C, D, E and F."""
    return found[TURN >= 0].tolist()


def test_returns() -> None:
    turns = StepTurns.of(ROWS, TASK, 0.5)
    assert turns.returns.tolist() == [2.0, 2.0, 3.0, 6.0, 4.0, 4.0]
    assert turns.group.tolist() == [0, 1, 0, 1, 2, 0]
    assert StepTurns.of(ROWS, TASK, 0.0).returns.tolist() == [1.0, 2.0, 0.0, 4.0, 4.0, 4.0]
    assert StepTurns.of(ROWS, TASK, 1.0).returns.tolist() == [3.0, 2.0, 8.0, 8.0, 4.0, 4.0]
    assert turns.index == {(0, 0): 0, (1, 0): 2, (2, 0): 5}


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Both tokens of sample 0's second turn have its advantage; E is alone in its turn.
        (dr_grpo.Advantage(), [-1.0, -2.0, -2.0, 0.0, 2.0, 0.0, 1.0]),
        (grpo.Advantage(epsilon=1e-12), [-1.0, -(0.5**0.5), -(0.5**0.5), 0.0, 0.5**0.5, 0.0, 1.0]),
        (rloo.Advantage(), [-1.5, -4.0, -4.0, 0.0, 4.0, 0.0, 1.5]),
        # All six turns: mean 3.5, squares 2.25 2.25 .25 6.25 .25 .25 = 11.5, variance 2.3.
        (batch_norm.Advantage(epsilon=1e-12), [each / 2.3**0.5 for each in (-1.5, -1.5, -1.5, -0.5, 2.5, 0.5, 0.5)]),
    ],
)
def test_advantages_of_turns(advantage: object, expected: list[float]) -> None:
    found, _ = advantage(batch())
    assert by_hand(found) == pytest.approx(expected, abs=1e-6)
    assert found[TURN < 0].tolist() == [0.0] * 5


def test_rewards_are_at_the_last_tokens_of_turns() -> None:
    assert batch().rewards.tolist() == [0, 1, 0, 0, 2, 0, 0, 0, 4, 4, 0, 4]


def test_a_critic_discounts_between_turns() -> None:
    """Values 0 and lambda 1: the discounted rewards to come, within a turn without a discount.

    With a value of 2 before B0, sample 0 has B1 2, B0 2 - 2 = 0, and A0 1 + 0.5 x 2 + 0.5 x 0 = 2.
    """
    advantage = gae.Advantage(gamma=1.0, gae_lambda=1.0)
    zeros = torch.zeros(12)
    found, _ = advantage(batch(values=zeros, end_values=torch.zeros(3)))
    assert by_hand(found) == [2.0, 2.0, 2.0, 3.0, 6.0, 4.0, 4.0]
    found, _ = advantage(batch(values=zeros.index_fill(0, torch.tensor([3]), 2.0), end_values=torch.zeros(3)))
    assert by_hand(found)[:3] == [2.0, 0.0, 2.0]
    found, _ = gae.Advantage(gamma=0.5)(batch(1.0, values=zeros, end_values=torch.zeros(3)))
    assert by_hand(found)[:3] == [1.5, 1.0, 2.0]  # 1 + 0.5 x 1, as A0 is two tokens before B1


def test_a_group_counts_if_one_of_its_turns_differs() -> None:
    """Tasks 0 and 1 of two samples each: equal sums by other turns, and equal turns."""
    tasks, valid = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    rows = [(0, 0, 0, 1.0, 1), (0, 0, 1, 1.0, 1), (1, 0, 0, 2.0, 1), (1, 0, 1, 0.0, 1)]
    rows += [(sample, 0, turn, 1.0, 1) for sample in (2, 3) for turn in (0, 1)]
    assert StepTurns.of(rows, tasks, 1.0).informative("group", valid, tasks).tolist() == [True, False]
    assert StepTurns.of(rows, tasks, 1.0).informative("critic", valid, tasks).tolist() == [True, True]
    left = valid.index_fill(0, torch.tensor([1]), False)
    assert StepTurns.of(rows, tasks, 1.0).informative("group", left, tasks).tolist() == [False, False]


def test_a_sample_that_failed_is_in_no_baseline() -> None:
    valid = torch.tensor([True, True, False])
    step = StepRewards(torch.tensor([3.0, 8.0, 0.0]), valid, TASK, valid[:1], valid, torch.ones(3).long())
    turns = StepTurns.of(ROWS, TASK, 0.5).rewards(step, "group")
    assert turns.valid.tolist() == turns.in_loss.tolist() == [True, True, True, True, True, False]


def test_without_the_flag_a_batch_is_as_it_was() -> None:
    plain = token_batch(SEQUENCE, (TURN >= 0).float())
    assert by_turn(plain) is plain
