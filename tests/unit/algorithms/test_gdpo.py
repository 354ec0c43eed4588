"""GDPO on numbers worked out by hand: two rewards, two groups.

    group     0    0    0    1    1
    right     0    1    2    0    4       group 0: mean 1, std 1; group 1: mean 2, std 2 sqrt(2)
    format    3    3    3    1    0       group 0: no difference; group 1: mean 0.5, std 1 / sqrt(2)

Normalised apart and added up: -1, 0, 1 and (-1 + 1) / sqrt(2) = 0 twice. Added up first, group 1 has 1 and 4.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.advantages import gdpo
from megatron_rl.errors import ConfigError
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.samples import SampleBuilder, reward_metrics
from megatron_rl.types import RolloutGroup
from tests.support.rollouts import graded_group
from tests.support.tokens import one_token_a_sample, step_rewards

GROUPS = torch.tensor([0, 0, 0, 1, 1])
RIGHT, FORMAT = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0]), torch.tensor([3.0, 3.0, 3.0, 1.0, 0.0])
STEP = replace(step_rewards(RIGHT, torch.ones(5, dtype=torch.bool), GROUPS), parts=torch.stack((RIGHT, FORMAT), 1))


def run(step: object = STEP, **options: object) -> list[float]:
    return gdpo.Advantage(rewards="right+format", **options)(one_token_a_sample(step))[0].tolist()


def test_each_reward_is_normalised_in_its_group_and_their_sum_over_the_step() -> None:
    # -1, 0, 1, 0, 0: mean 0, variance 2 / 4: divided by 0.707107.
    assert run() == pytest.approx([-1.414214, 0.0, 1.414214, 0.0, 0.0], abs=1e-5)


def test_weights_count_after_the_normalisation() -> None:
    # -1, 0, 1, (-1 + 3) / sqrt(2) = 1.414214 and -1.414214: variance (2 + 4) / 4, std 1.224745.
    assert run(weights="1+3") == pytest.approx([-0.816497, 0.0, 0.816497, 1.154701, -1.154701], abs=1e-5)


def test_samples_that_are_not_trained_on_leave_mean_and_std_of_the_step() -> None:
    """-1, 0, (1), 0, 0 without the third: mean -0.25, squares 0.5625 + 3 * 0.0625 = 0.75, std 0.5."""
    step = replace(STEP, in_loss=torch.tensor([True, True, False, True, True]))
    assert run(step) == pytest.approx([-1.5, 0.5, 0.0, 0.5, 0.5], abs=1e-5)


def test_of_one_reward_it_is_grpo_over_its_std_in_the_step() -> None:
    # -1, 0, 1, -0.707107, 0.707107: variance 3 / 4, std 0.866025.
    alone = gdpo.Advantage()(one_token_a_sample(replace(STEP, parts=None)))[0].tolist()
    assert alone == pytest.approx([-1.154701, 0.0, 1.154701, -0.816497, 0.816497], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rewards": "right+right"}, r"rewards=right\+right must name each reward once"),
        ({"rewards": "right+"}, r"must name each reward once"),
        ({"rewards": "a+b", "weights": "1"}, r"weights=1 must be 2 numbers, one for each of rewards=a\+b"),
        ({"rewards": "a", "weights": "high"}, r"weights=high must be 1 numbers"),
        ({"rewards": "a", "weights": "nan"}, r"weights=nan must be 1 numbers"),
    ],
)
def test_names_and_weights_that_do_not_fit_are_refused(options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        gdpo.Advantage(**options)


def with_format(group: RolloutGroup, values: list[float | None]) -> RolloutGroup:
    rollouts = [
        replace(rollout, grade=replace(rollout.grade, metrics={} if value is None else {"format": value}))
        for rollout, value in zip(group.rollouts, values, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_rewards_come_from_the_grades_and_any_of_them_is_a_signal(one_rank: ParallelGroups) -> None:
    """The first group differs in its format alone; the second in nothing; the third has a grade that failed."""
    builder = SampleBuilder("group", False, one_rank, reward_names=("reward", "format"))
    rollouts = [
        with_format(graded_group([1.0, 1.0]), [0.0, 1.0]),
        with_format(graded_group([0.0, 0.0]), [1.0, 1.0]),
        with_format(graded_group([0.0, None, 1.0]), [0.5, None, 0.5]),
    ]
    _, step = builder.build(rollouts, range(3), 0)
    assert step.informative.tolist() == [True, False, True]
    assert step.parts[step.valid].tolist() == [[1, 0], [1, 1], [0, 1], [0, 1], [0, 0.5], [1, 0.5]]
    assert gdpo.Advantage(rewards="reward+format")(one_token_a_sample(step))[0][2:4].tolist() == [0.0, 0.0]


def test_a_grade_without_one_of_the_rewards_is_masked(one_rank: ParallelGroups) -> None:
    """One of four may; of the three that are left the second group has a single one."""
    rollouts = [
        with_format(graded_group([0.0, 1.0]), [0.0, 1.0]),
        with_format(graded_group([0.0, 1.0]), [None, 0.5]),
    ]
    builder = SampleBuilder("group", True, one_rank, reward_names=("reward", "format"), max_failed_share=0.25)
    samples, step = builder.build(rollouts, range(2), 0)
    assert step.valid.tolist() == step.in_loss.tolist() == [True, True, False, True]
    assert [sample.sample_id for sample in samples] == [0, 1, 3]
    assert step.informative.tolist() == [True, False]
    assert reward_metrics(step)["training/failed_grades"] == 1
    with pytest.raises(ConfigError, match="1 of 4 grades of this step have no metric 'format'"):
        replace(builder, max_failed_share=0.2).build(rollouts, range(2), 0)


def test_a_grade_without_the_reward_ends_the_run_by_name(one_rank: ParallelGroups) -> None:
    builder = SampleBuilder("group", False, one_rank, reward_names=("reward", "style"))
    with pytest.raises(ConfigError, match=r"rewards=reward\+style: 2 of 2 grades of this step have no metric 'style'"):
        builder.build([graded_group([0.0, 1.0])], [0], 0)
