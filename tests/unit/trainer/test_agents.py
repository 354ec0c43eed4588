"""Samples of several agents in training, on numbers worked out by hand.

Two tasks; the second one's samples have no agents, and one of them has failed. Of the first::

                planner           worker
    sample 0    1.0, 2 tokens     4.0, 1 + 2 tokens in two sequences
    sample 1    0.0, 1 token      2.0, 1 token
    sample 2    2.0, 1 token      did not act

So the planner's rewards have mean 1 and standard deviation 1, the worker's mean 3 and standard deviation sqrt(2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import StepRewards, TokenBatch
from megatron_rl.algorithms.advantages import gae, grpo, reinforce_plus_plus, rloo
from megatron_rl.algorithms.batch import Sample, token_weights
from megatron_rl.algorithms.covariance import places
from megatron_rl.algorithms.filters import signal
from megatron_rl.algorithms.turns import by_turn
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.filtering import counts_in
from megatron_rl.run.reporting import sequence_advantages
from megatron_rl.trainer.batches import exchange_samples
from megatron_rl.trainer.packing import collate, without_loss
from megatron_rl.trainer.policy import advantage_metrics
from megatron_rl.trainer.samples import SampleBuilder, reward_metrics
from megatron_rl.types import Completion, Grade, Rollout, RolloutGroup
from tests.support.rollouts import FAILED, drawn, graded_group, group_of, sample_of
from tests.support.tokens import changed

ROOT2 = 2**0.5


def acted(agents: Sequence[str], rewards: dict[str, float], *completions: Completion) -> Rollout:
    sample = sample_of(9.0, *(([0], completion) for completion in completions))
    return rewarded(replace(sample, agents=tuple(agents)), rewards)


def rewarded(sample: Rollout, rewards: dict[str, float]) -> Rollout:
    return replace(sample, grade=Grade(9.0, agent_rewards=rewards))


FIRST = acted(
    ("planner", "worker", "worker"), {"planner": 1.0, "worker": 4.0}, drawn([1, 2]), drawn([3]), drawn([4, 5])
)
SECOND = acted(("planner", "worker"), {"planner": 0.0, "worker": 2.0}, drawn([1]), drawn([3], finish_reason="length"))
THIRD = acted(("planner",), {"planner": 2.0}, drawn([6]))
GROUP = group_of(FIRST, SECOND, THIRD)
OTHERS = graded_group([1.0, None, 3.0])


def build(
    groups: ParallelGroups, *rollouts: RolloutGroup, keep: bool = True, **more: object
) -> tuple[tuple[Sample, ...], StepRewards]:
    return SampleBuilder("group", keep, groups, **more).build(rollouts, range(len(rollouts)), 0)


def laid(samples: Sequence[Sample], step: StepRewards) -> TokenBatch:
    return replace(collate(samples, "cpu", round_to=8), step=step)


def test_rows_are_of_agents_and_samples_keep_their_numbers(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, GROUP, OTHERS)
    assert [(s.sample_id, s.sequence, s.first_sequence, s.tokens_elsewhere, s.reward) for s in samples] == [
        (0, 0, 0, 0, 1.0), (0, 1, 1, 2, 4.0), (0, 2, 1, 1, 4.0), (1, 0, 0, 0, 0.0), (1, 1, 1, 0, 2.0),
        (2, 0, 0, 0, 2.0), (3, 0, 0, 0, 1.0), (5, 0, 0, 0, 3.0),
    ]  # fmt: skip
    assert step.rewards.tolist() == [1.0, 4.0, 0.0, 2.0, 2.0, 1.0, 0.0, 3.0]
    assert step.group_index.tolist() == [0, 1, 0, 1, 0, 2, 2, 2]
    assert step.loss_tokens.tolist() == [2, 3, 1, 1, 1, 1, 2, 3]
    assert step.valid.tolist() == [True] * 6 + [False, True]
    assert step.informative_tasks.tolist() == [True, True]
    assert reward_metrics(step)["training/failed_grades"] == 1


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (grpo.Advantage(), {"planner": [0, -1, 1], "worker": [ROOT2 / 2, -ROOT2 / 2], "": [-ROOT2 / 2, ROOT2 / 2]}),
        # Against the mean of the others: planner (0 + 2) / 2, (1 + 2) / 2, (1 + 0) / 2; worker 2 and 4.
        (rloo.Advantage(), {"planner": [0.0, -1.5, 1.5], "worker": [2.0, -2.0], "": [-2.0, 2.0]}),
    ],
)
def test_an_agent_is_compared_with_itself(
    one_rank: ParallelGroups, advantage: object, expected: dict[str, list[float]]
) -> None:
    samples, step = build(one_rank, GROUP, OTHERS)
    batch = laid(samples, step)
    found = sequence_advantages(replace(batch, advantages=advantage(batch)[0]))
    of = {name: [found[key] for key in keys] for name, keys in {
        "planner": [(0, 0), (1, 0), (2, 0)], "worker": [(0, 1), (1, 1)], "": [(3, 0), (5, 0)],
    }.items()}  # fmt: skip
    for name, values in expected.items():
        assert of[name] == pytest.approx(values, abs=1e-5), name
    assert found[0, 2] == found[0, 1], "both sequences of the worker"


def test_a_batch_baseline_counts_the_tokens_of_each_agent(one_rank: ParallelGroups) -> None:
    """Rewards by tokens 1 1 4 4 4 0 2 2: mean 18 / 8 = 2.25, squares 58 - 40.5 = 17.5, variance 2.5."""
    samples, step = SampleBuilder("batch", False, one_rank).build([GROUP], [0], 0)
    batch = laid(samples, step)
    found = sequence_advantages(replace(batch, advantages=reinforce_plus_plus.Advantage()(batch)[0]))
    assert found[0, 2] == pytest.approx(1.75 / 2.5**0.5, abs=1e-5)
    assert found[1, 0] == pytest.approx(-2.25 / 2.5**0.5, abs=1e-5)


def test_denominators_count_the_part_of_each_agent(one_rank: ParallelGroups) -> None:
    """Five parts, whose tokens weigh 1/2 1/2, 1/3 of three in two sequences, and 1; however they are laid."""
    samples, step = build(one_rank, GROUP)
    for laid_out in ([samples], [samples[2:], samples[:2]], [[one] for one in samples]):
        weights, below, tokens = 0.0, 0, 0
        for part in laid_out:
            batch = laid(part, step)
            weight, denominator = token_weights("sequence-mean", batch, 1.0)
            weights, below = weights + weight.sum(), below + int(denominator)
            tokens += int(token_weights("token-mean", batch, 1.0)[1])
        assert (float(weights), below, tokens) == (pytest.approx(5.0), 5, 8)
    idle = replace(without_loss(laid(samples, step)), step=step)
    assert not idle.rows and int(token_weights("sequence-mean", idle, 1.0)[1]) == 0


def test_masks_and_groups_without_variance_are_of_an_agent(one_rank: ParallelGroups) -> None:
    """The worker was cut in sample 1; in another task only the worker's rewards differ."""
    masked, _ = build(one_rank, GROUP, masks_truncated=True)
    assert [(s.sample_id, s.sequence) for s in masked] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    equal = [rewarded(each, each.grade.agent_rewards | {"planner": 1.0}) for each in (FIRST, SECOND)]
    samples, step = build(one_rank, group_of(*equal), keep=False)
    assert [(s.sample_id, s.sequence) for s in samples] == [(0, 1), (0, 2), (1, 1)]
    assert (step.informative.tolist(), step.informative_tasks.tolist()) == ([False, True], [True])
    assert counts_in(signal.Filter(), group_of(*equal))
    alike = [rewarded(each, {"planner": 1.0, "worker": 2.0}) for each in (FIRST, SECOND)]
    assert not counts_in(signal.Filter(), group_of(*alike)), "they differ by agent, not within one"


def test_a_failed_sample_is_one_masked_row(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, group_of(replace(FIRST, grade=FAILED), SECOND, THIRD))
    assert [(s.sample_id, s.sequence) for s in samples] == [(1, 0), (1, 1), (2, 0)]
    assert (step.valid.tolist(), step.group_index.tolist()) == ([False, True, True, True], [0, 0, 1, 0])
    batch = laid(samples, step)
    assert sequence_advantages(replace(batch, advantages=grpo.Advantage()(batch)[0])) == pytest.approx(
        {(1, 0): -1 / ROOT2, (1, 1): 0.0, (2, 0): 1 / ROOT2}, abs=1e-5
    )


def test_gae_ends_each_sequence_with_its_agent_s_reward(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, GROUP)
    batch = laid(samples, step)
    batch = changed(batch, values=torch.zeros(16), end_values=torch.zeros(len(batch.packing.lengths)))
    found = gae.Advantage(gamma=0.5, gae_lambda=1.0)(batch)[0]
    assert found[batch.in_loss].tolist() == [0.5, 1.0, 4.0, 2.0, 4.0, 0.0, 2.0, 2.0]


def test_rewards_by_turn_are_compared_within_an_agent(one_rank: ParallelGroups) -> None:
    """Of the first turns: planner 1 and 0, worker 4 and 2; a worker's second turn has no other."""
    two_turns = drawn([4, 0, 5], environment_spans=((1, 2),), turn_rewards=(1.0, 6.0))
    first = acted(("planner", "worker"), {"planner": 1.0, "worker": 7.0}, drawn([1, 2]), two_turns)
    samples, step = build(one_rank, group_of(first, SECOND), turn_discount=0.5)
    batch = by_turn(laid(samples, step))
    found = grpo.Advantage()(batch)[0]
    # The worker's returns of the first turn are 1 + 0.5 x 6 = 4 and 2.
    assert batch.step.rewards.tolist() == [1.0, 4.0, 6.0, 0.0, 2.0]
    assert found[batch.in_loss].tolist() == pytest.approx(
        [1 / ROOT2, 1 / ROOT2, 1 / ROOT2, 0.0, -1 / ROOT2, -1 / ROOT2], abs=1e-5
    )


def test_what_travels_and_what_is_counted(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, GROUP)
    device = torch.device("cpu")
    travelled = exchange_samples(samples, [0] * len(samples), one_rank.rollout_group, device, 1)
    assert [(s.sample_id, s.sequence, s.first_sequence) for s in travelled] == [
        (s.sample_id, s.sequence, s.first_sequence) for s in samples
    ]
    batch = laid(samples, step)
    batch = replace(batch, advantages=grpo.Advantage()(batch)[0])
    metrics = advantage_metrics([[batch]], one_rank.data_group)
    assert metrics["critic/advantages/min"] == pytest.approx(-1.0, abs=1e-5), "not the mean with the other agent's"
    assert places(batch)[batch.in_loss].unique().numel() == 8


def test_a_step_without_agents_has_the_rows_of_samples(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, OTHERS)
    assert step.agents is None
    assert laid(samples, step).rows == (0, 2)
