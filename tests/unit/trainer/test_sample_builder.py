"""Graded groups to samples: who is in the loss, with which advantage, under which number."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.algorithms.interfaces import AdvantageConfig
from megatron_rl.errors import EnvironmentFault
from megatron_rl.parallel import ParallelGroups
from megatron_rl.registry import ADVANTAGES
from megatron_rl.trainer.samples import SampleBuilder, StepSamples, refuse_failures, reward_metrics
from megatron_rl.types import RolloutGroup
from tests.support.rollouts import graded_group


def build(
    groups: ParallelGroups, rollouts: list[RolloutGroup], keep: bool = False, advantage: str = "dr_grpo"
) -> StepSamples:
    """``dr_grpo`` is reward minus mean: easy to work out."""
    builder = SampleBuilder(ADVANTAGES.module(advantage), AdvantageConfig(), keep, groups)
    return builder.build(rollouts, range(len(rollouts)))


def test_a_sample_carries_its_group_and_its_own_tokens(one_rank: ParallelGroups) -> None:
    step = build(one_rank, [graded_group([0.0, 1.0], prompt_ids=(7, 8, 9)), graded_group([3.0, 1.0])])
    assert [sample.sample_id for sample in step.samples] == [0, 1, 2, 3]
    assert [sample.advantage for sample in step.samples] == [-0.5, 0.5, 1.0, -1.0]
    second = step.samples[1]
    assert second.token_ids.tolist() == [7, 8, 9, 11, 11]
    assert second.prompt_length == 3
    assert second.inference_logprobs.tolist() == [0.0, 0.0, 0.0, -1.5, -1.5]


def test_failed_grades_leave_baseline_and_loss(one_rank: ParallelGroups) -> None:
    # The mean of the two valid rewards is 2, not that of 1, 3 and an invented 0.
    step = build(one_rank, [graded_group([1.0, None, 3.0])])
    assert [sample.sample_id for sample in step.samples] == [0, 2]
    assert [sample.advantage for sample in step.samples] == [-1.0, 1.0]
    assert (step.num_samples, step.num_failed) == (3, 1)
    assert step.rewards.tolist() == [1.0, 3.0]
    assert step.advantages.tolist() == [-1.0, 1.0]


def test_groups_without_signal_are_dropped_unless_kept(one_rank: ParallelGroups) -> None:
    rollouts = [graded_group([1.0, 1.0]), graded_group([0.0, 1.0]), graded_group([None, 1.0])]
    dropped = build(one_rank, rollouts)
    assert [sample.sample_id for sample in dropped.samples] == [2, 3]
    kept = build(one_rank, rollouts, keep=True)
    # The last group's one valid sample has no other to compare with; it is kept with advantage 0.
    assert [(s.sample_id, s.advantage) for s in kept.samples] == [
        (0, 0.0), (1, 0.0), (2, -0.5), (3, 0.5), (5, 0.0),
    ]  # fmt: skip
    for step in (dropped, kept):
        assert (step.num_groups, step.num_groups_with_signal) == (3, 1)
        assert step.rewards.numel() == 5
    assert (dropped.advantages.numel(), kept.advantages.numel()) == (2, 5)


def test_with_a_baseline_of_the_batch_groups_of_equal_rewards_stay(one_rank: ParallelGroups) -> None:
    """Rewards 1 1 0 1 0 0 1 and one without a grade: mean 4 / 7, variance (4 * 9 + 3 * 16) / 49 / 6 = 2 / 7."""
    rollouts = [graded_group(pair) for pair in ([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, None])]
    step = build(one_rank, rollouts, advantage="batch_norm")
    high, low = (3 / 7) / (2 / 7) ** 0.5, -(4 / 7) / (2 / 7) ** 0.5
    expected = [high, high, low, high, low, low, high]
    assert [sample.advantage for sample in step.samples] == pytest.approx(expected, abs=1e-5)
    assert reward_metrics(step)["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
    assert (step.num_groups, step.num_groups_with_signal) == (4, 4)
    equal = build(one_rank, [graded_group([1.0, 1.0]), graded_group([1.0, 1.0])], advantage="batch_norm")
    assert (equal.samples, equal.num_groups_with_signal) == ((), 0)


def test_groups_of_one_sample_have_a_baseline_in_the_batch(one_rank: ParallelGroups) -> None:
    """Rewards 0 and 2: mean 1, standard deviation sqrt(2)."""
    step = build(one_rank, [graded_group([0.0]), graded_group([2.0])], advantage="batch_norm")
    assert [sample.advantage for sample in step.samples] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert build(one_rank, [graded_group([0.0]), graded_group([2.0])], advantage="grpo").samples == ()


def test_an_empty_completion_is_no_sample(one_rank: ParallelGroups) -> None:
    step = build(one_rank, [graded_group([0.0, 1.0], lengths=[0, 2])])
    assert [sample.sample_id for sample in step.samples] == [1]


def test_nothing_at_all(one_rank: ParallelGroups) -> None:
    step = build(one_rank, [])
    assert (step.samples, step.num_samples, step.num_groups) == ((), 0, 0)
    assert reward_metrics(step)["training/signal_share"] == 0.0


def test_metrics(one_rank: ParallelGroups) -> None:
    step = build(one_rank, [graded_group([-1.0, 1.0]), graded_group([2.0, None]), graded_group([0.0, 0.0])])
    assert reward_metrics(step) == pytest.approx(
        {
            "training/groups_with_signal": 1.0,
            "training/signal_share": 1 / 3,
            "training/failed_grades": 1.0,
            "critic/rewards/mean": 0.4,  # (-1 + 1 + 2 + 0 + 0) / 5
            "critic/rewards/max": 2.0,
            "critic/rewards/min": -1.0,
            "critic/score/mean": 0.4,  # two of five are positive
            "critic/advantages/mean": 0.0,
            "critic/advantages/max": 1.0,
            "critic/advantages/min": -1.0,
        }
    )


def test_too_many_failures_stop_the_run(one_rank: ParallelGroups) -> None:
    step = build(one_rank, [graded_group([1.0, None, 0.0, 1.0])])
    refuse_failures(step, {"timeout": 1}, largest_share=0.25)
    with pytest.raises(EnvironmentFault, match=r"1 of 4 grades failed \(timeout 1\), more than the 20%"):
        refuse_failures(step, {"timeout": 1}, largest_share=0.2)


def test_advantages_are_detached_fp32(one_rank: ParallelGroups) -> None:
    step = build(one_rank, [graded_group([0.1, 0.2, 0.9])], advantage="grpo")
    assert step.advantages.dtype == torch.float32
    assert step.samples[0].advantage == step.advantages[0].item()
