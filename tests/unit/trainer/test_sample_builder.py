"""Graded groups to samples: who is in the loss, with which reward, under which number."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest

from megatron_rl.algorithms import StepRewards
from megatron_rl.algorithms.advantages import batch_norm, dr_grpo
from megatron_rl.algorithms.batch import Sample
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.samples import SampleBuilder, reward_metrics
from megatron_rl.types import RolloutGroup
from tests.support.generation import versions_of
from tests.support.rollouts import drawn, graded_group, group_of, sample_of
from tests.support.tokens import one_token_a_sample


def build(
    groups: ParallelGroups,
    rollouts: list[RolloutGroup],
    keep: bool = False,
    baseline: str = "group",
    mask: bool = False,
) -> tuple[tuple[Sample, ...], StepRewards]:
    return SampleBuilder(baseline, keep, groups, mask).build(rollouts, range(len(rollouts)), 0)


def advantages(module: ModuleType, step: StepRewards) -> list[float]:
    """Of the samples in the loss."""
    return module.Advantage()(one_token_a_sample(step))[0][step.in_loss].tolist()


def test_a_sample_carries_its_reward_and_its_own_tokens(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, [graded_group([0.0, 1.0], prompt_ids=(7, 8, 9)), graded_group([3.0, 1.0])])
    assert [(sample.sample_id, sample.reward) for sample in samples] == [(0, 0.0), (1, 1.0), (2, 3.0), (3, 1.0)]
    assert advantages(dr_grpo, step) == [-0.5, 0.5, 1.0, -1.0]
    assert step.group_index.tolist() == [0, 0, 1, 1]
    second = samples[1]
    assert second.token_ids.tolist() == [7, 8, 9, 11, 11]
    assert step.loss_tokens.tolist() == [1, 2, 1, 2]
    assert second.loss_mask.tolist() == [False, False, False, True, True]
    assert second.inference_logprobs.tolist() == [0.0, 0.0, 0.0, -1.5, -1.5]


def test_what_a_conversation_read_is_no_loss_token(one_rank: ParallelGroups) -> None:
    """Of 2 tokens the second answer read one."""
    group = graded_group([0.0, 1.0])
    first, second = group.rollouts
    read = dataclasses.replace(second.completion, environment_spans=((0, 1),))
    told = dataclasses.replace(group, rollouts=(first, dataclasses.replace(second, completion=read)))
    samples, step = build(one_rank, [told])
    assert step.loss_tokens.tolist() == [1, 1]
    assert samples[1].loss_mask.tolist() == [False] * len(group.prompt_ids) + [False, True]


def test_versions_are_those_of_the_answer_behind_its_prompt(one_rank: ParallelGroups) -> None:
    group = graded_group([0.0, 1.0], prompt_ids=(7, 8, 9))
    first, second = group.rollouts
    drawn = dataclasses.replace(second.completion, policy_version=4, older=((2, 1),))
    told = dataclasses.replace(group, rollouts=(first, dataclasses.replace(second, completion=drawn)))
    samples, _ = build(one_rank, [told])
    assert versions_of(drawn) == (2, 4)
    assert samples[1].versions.tolist() == [2, 2, 2, 2, 4]


def test_failed_grades_leave_baseline_and_loss(one_rank: ParallelGroups) -> None:
    # The mean of the two valid rewards is 2, not that of 1, 3 and an invented 0.
    samples, step = build(one_rank, [graded_group([1.0, None, 3.0])])
    assert [sample.sample_id for sample in samples] == [0, 2]
    assert step.valid.tolist() == step.in_loss.tolist() == [True, False, True]
    assert advantages(dr_grpo, step) == [-1.0, 1.0]


def test_truncated_answers_leave_the_loss_and_not_the_baseline(one_rank: ParallelGroups) -> None:
    """Overlong filtering of DAPO: the mean of 0, 1 and 2 stays 1."""
    rollouts = [graded_group([0.0, 1.0, 2.0], finish_reasons=["stop", "length", "stop_string"])]
    samples, step = build(one_rank, rollouts, mask=True)
    assert [sample.sample_id for sample in samples] == [0, 2]
    assert step.in_loss.tolist() == [True, False, True]
    assert step.valid.all()
    assert advantages(dr_grpo, step) == [-1.0, 1.0]
    assert build(one_rank, rollouts)[1].in_loss.all()


def test_groups_without_signal_are_dropped_unless_kept(one_rank: ParallelGroups) -> None:
    rollouts = [graded_group([1.0, 1.0]), graded_group([0.0, 1.0]), graded_group([None, 1.0])]
    dropped, step = build(one_rank, rollouts)
    assert [sample.sample_id for sample in dropped] == [2, 3]
    kept, step_kept = build(one_rank, rollouts, keep=True)
    assert [sample.sample_id for sample in kept] == [0, 1, 2, 3, 5]
    # The last group's one valid sample has no other to compare with; it is kept with advantage 0.
    assert advantages(dr_grpo, step_kept) == [0.0, 0.0, -0.5, 0.5, 0.0]
    for each in (step, step_kept):
        assert each.informative.tolist() == [False, True, False]
        assert each.valid.sum() == 5
    assert (step.in_loss.sum(), step_kept.in_loss.sum()) == (2, 5)


def test_with_a_baseline_of_the_batch_groups_of_equal_rewards_stay(one_rank: ParallelGroups) -> None:
    """Rewards 1 1 0 1 0 0 1 and one without a grade: mean 4 / 7, variance (4 * 9 + 3 * 16) / 49 / 6 = 2 / 7."""
    rollouts = [graded_group(pair) for pair in ([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, None])]
    samples, step = build(one_rank, rollouts, baseline="batch")
    high, low = (3 / 7) / (2 / 7) ** 0.5, -(4 / 7) / (2 / 7) ** 0.5
    assert advantages(batch_norm, step) == pytest.approx([high, high, low, high, low, low, high], abs=1e-5)
    assert (len(samples), step.informative.tolist()) == (7, [True] * 4)
    equal, step = build(one_rank, [graded_group([1.0, 1.0]), graded_group([1.0, 1.0])], baseline="batch")
    assert (equal, step.informative.tolist()) == ((), [False, False])


def test_groups_of_one_sample_have_a_baseline_in_the_batch(one_rank: ParallelGroups) -> None:
    """Rewards 0 and 2: mean 1, standard deviation sqrt(2)."""
    _, step = build(one_rank, [graded_group([0.0]), graded_group([2.0])], baseline="batch")
    assert advantages(batch_norm, step) == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert build(one_rank, [graded_group([0.0]), graded_group([2.0])])[0] == ()


def test_an_empty_completion_is_no_sample(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, [graded_group([0.0, 1.0], lengths=[0, 2])])
    assert step.loss_tokens.tolist() == [0, 2]
    assert [sample.sample_id for sample in samples] == [1]


def test_nothing_at_all(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, [])
    assert (samples, step.rewards.numel(), step.informative.numel()) == ((), 0, 0)
    assert reward_metrics(step)["training/signal_share"] == 0.0


def test_metrics(one_rank: ParallelGroups) -> None:
    _, step = build(one_rank, [graded_group([-1.0, 1.0]), graded_group([2.0, None]), graded_group([0.0, 0.0])])
    assert reward_metrics(step) == pytest.approx(
        {
            "training/groups_with_signal": 1.0,
            "training/signal_share": 1 / 3,
            "training/failed_grades": 1.0,
            "critic/rewards/mean": 0.4,  # (-1 + 1 + 2 + 0 + 0) / 5
            "critic/rewards/max": 2.0,
            "critic/rewards/min": -1.0,
            "critic/score/mean": 0.4,
        }
    )


def test_the_score_is_the_mean_reward_and_not_the_share_of_positive_ones(one_rank: ParallelGroups) -> None:
    """verl: the mean over sequences of the summed token-level score. Of -1, 1, 1, 0.5 it is 0.375."""
    _, step = build(one_rank, [graded_group([-1.0, 1.0]), graded_group([1.0, 0.5])])
    assert reward_metrics(step)["critic/score/mean"] == pytest.approx(0.375)


def test_turns_are_numbered_over_all_sequences(one_rank: ParallelGroups) -> None:
    """Sample 0 has turns ``A | B C`` and a branch of one, sample 1 one turn and no rewards by turn."""
    spoken = drawn([3, 9, 4, 5], environment_spans=((1, 2),), turn_rewards=(1.0, 2.0))
    several = sample_of(7.0, ((1,), spoken), ((1, 3), drawn([6], turn_rewards=(4.0,))))
    group = group_of(several, sample_of(0.5, ((1,), drawn([7, 8]))))
    builder = SampleBuilder("group", False, one_rank, turn_discount=0.5)
    samples, step = builder.build([group], [0], 3)
    assert [sample.turn.tolist() for sample in samples] == [[-1, 0, -1, 1, 1], [-1, -1, 2], [-1, 3, 3]]
    assert step.rewards.tolist() == [7.0, 0.5]
    turns = step.turns
    assert turns.own.tolist() == [1.0, 2.0, 4.0, 0.5]
    assert turns.rewards.tolist() == [2.0, 2.0, 4.0, 0.5]
    assert turns.group_index.tolist() == [0, 1, 0, 0]
    assert turns.loss_tokens.tolist() == [1, 2, 1, 2]
    assert (turns.policy_version, turns.discount) == (3, 0.5)


def test_other_turns_of_one_sum_are_trained_on(one_rank: ParallelGroups) -> None:
    first, second = (drawn([3, 9, 4], environment_spans=((1, 2),), turn_rewards=each) for each in ((1, 0), (0, 1)))
    group = group_of(sample_of(1.0, ((1,), first)), sample_of(1.0, ((1,), second)))
    assert SampleBuilder("group", False, one_rank).build([group], [0], 0)[0] == ()
    samples, step = SampleBuilder("group", False, one_rank, turn_discount=1.0).build([group], [0], 0)
    assert len(samples) == 2
    assert step.turns.rewards.tolist() == [1.0, 0.0, 1.0, 1.0]
