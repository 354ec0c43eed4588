"""Samples of several sequences, on numbers worked out by hand.

Two samples over a vocabulary of four tokens; the model is a table, row i the logits after token i, all 0::

    sample 0, advantage 1     0 | 1 2        the prompt 0, and two written tokens
                              0 1 | 3        a branch: the model's own 1 is part of its prompt
    sample 1, advantage -1    0 | 2

So four tokens are trained on, three of them of sample 0: 1 after 0, 2 after 1, 3 after 1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import StepRewards, TokenBatch
from megatron_rl.algorithms.advantages import gae, grpo, reinforce_plus_plus
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.covariance import places
from megatron_rl.algorithms.kl import with_kl_in_reward
from megatron_rl.algorithms.losses import gspo
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.reporting import sequence_advantages
from megatron_rl.trainer.packing import collate, without_loss
from megatron_rl.trainer.policy import advantage_metrics
from megatron_rl.trainer.samples import SampleBuilder
from megatron_rl.types import Branch, Rollout
from tests.support.rollouts import drawn, group_of, sample_of
from tests.support.samples import gradients_of, own_reward, rewards_of
from tests.support.tokens import changed, correction
from tests.unit.trainer.test_policy_loss import PLAIN
from tests.unit.trainer.test_policy_trainer import Setup

LN4 = math.log(4)
BRANCHED = sample_of(1.0, ([0], drawn([1, 2], -LN4)), ([0, 1], drawn([3], -LN4)))
OTHER = sample_of(-1.0, ([0], drawn([2], -LN4)))


def build(groups: ParallelGroups, *rollouts: Rollout, **further: bool) -> tuple[tuple[Sample, ...], StepRewards]:
    return SampleBuilder("group", True, groups, **further).build([group_of(*rollouts)], [0], 0)


def gradient(
    objective: PolicyObjective, step: StepRewards, *micro_batches: list[Sample], shift: dict[int, float] | None = None
) -> tuple[float, torch.Tensor]:
    """The loss of these micro-batches and its gradient, [4, 4], of the table's rows.

    ``shift`` has, by token id, ``log(current / old)`` of the written tokens; 0 without.
    """
    table = torch.zeros(4, 4, requires_grad=True)
    total, below = 0.0, 0
    for samples in micro_batches:
        batch = replace(collate(samples, "cpu"), step=step)
        rows = table.log_softmax(-1)
        current = rows[batch.samples.token_ids.roll(1), batch.samples.token_ids]
        old = current.detach() - torch.tensor([(shift or {}).get(int(token), 0.0) for token in batch.samples.token_ids])
        scored = replace(batch, current_logprobs=current, old_logprobs=old, entropy=torch.zeros_like(current))
        part, denominator, _ = objective(replace(scored, advantages=own_reward(scored)[0]))
        total, below = total + part, below + int(denominator)
    (total / below).backward()
    return (total / below).item(), table.grad


# Of row i: the sum over the tokens trained on after i of -weight x advantage x (one-hot - 1/4).
EXPECTED = {
    # Weights 1/3 each in sample 0, 1 in sample 1; divided by 2 samples.
    "sequence-mean": [[-1 / 12, -1 / 4, 5 / 12, -1 / 12], [1 / 12, 1 / 12, -1 / 12, -1 / 12]],
    # Weight 1 each, divided by 4 tokens: 1 - 1/4 and so on; the two tokens after 0 have advantages 1 and -1.
    "token-mean": [[0.0, -1 / 4, 1 / 4, 0.0], [1 / 8, 1 / 8, -1 / 8, -1 / 8]],
    # Weight 1/8 each, divided by 2 samples.
    "constant": [[0.0, -1 / 16, 1 / 16, 0.0], [1 / 32, 1 / 32, -1 / 32, -1 / 32]],
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_gradient_of_the_three_aggregations(one_rank: ParallelGroups, kind: str) -> None:
    """However its sequences are laid into micro-batches."""
    objective = replace(PLAIN, aggregation=kind, aggregation_constant=8.0)
    (first, branch, other), step = build(one_rank, BRANCHED, OTHER)
    expected = torch.zeros(4, 4)
    expected[:2] = torch.tensor(EXPECTED[kind])
    for layout in ([[first, branch, other]], [[other, branch], [first]], [[first], [branch], [other]]):
        _, found = gradient(objective, step, *layout)
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_shared_token_that_is_trained_on_twice_is_another_gradient(one_rank: ParallelGroups, kind: str) -> None:
    """The control of the test above: the same text, 0 1 3, but with the shared 1 in the loss again."""
    twice = sample_of(1.0, ([0], drawn([1, 2], -LN4)), ([0], drawn([1, 3], -LN4)))
    samples, step = build(one_rank, twice, OTHER)
    objective = replace(PLAIN, aggregation=kind, aggregation_constant=8.0)
    assert (gradient(objective, step, list(samples))[1][:2] - torch.tensor(EXPECTED[kind])).abs().max() > 0.01


def test_what_a_sample_says_of_itself(one_rank: ParallelGroups) -> None:
    last = drawn([3, 0, 3, 3], finish_reason="length", environment_spans=((1, 3),))
    cut = sample_of(1.0, ([0], drawn([1, 2])), ([0, 1], last))
    samples, step = build(one_rank, cut, OTHER)
    assert [(s.sample_id, s.sequence, s.tokens_elsewhere, s.truncated) for s in samples] == [
        (0, 0, 2, False), (0, 1, 2, True), (1, 0, 0, False),
    ]  # fmt: skip
    assert [s.token_ids.tolist() for s in samples] == [[0, 1, 2], [0, 1, 3, 0, 3, 3], [0, 2]]
    assert samples[1].loss_mask.tolist() == [False, False, True, False, False, True]
    assert [s.reward for s in samples] == [1.0, 1.0, -1.0]
    assert step.loss_tokens.tolist() == [4, 1]
    assert [s.sample_id for s in build(one_rank, cut, OTHER, masks_truncated=True)[0]] == [1], "cut in one sequence"


def test_all_sequences_of_a_failed_sample_leave_the_loss(one_rank: ParallelGroups) -> None:
    failed = replace(BRANCHED, grade=sample_of(None, ([0], drawn([1]))).grade)
    samples, _ = build(one_rank, failed, OTHER)
    assert [s.sample_id for s in samples] == [1]


def test_an_empty_sequence_is_left_out_unless_it_is_the_first(one_rank: ParallelGroups) -> None:
    """Number 0 counts the sample in the denominator: the gradient is that of the others."""
    nothing, (branch,) = drawn([]), BRANCHED.branches
    moved = Branch((0,), BRANCHED.completion)
    empty = replace(BRANCHED, completion=nothing, branches=(Branch((0, 1), nothing), moved, branch))
    samples, step = build(one_rank, empty, OTHER)
    assert [(s.sample_id, s.sequence) for s in samples] == [(0, 0), (0, 2), (0, 3), (1, 0)]
    _, found = gradient(replace(PLAIN, aggregation="sequence-mean"), step, list(samples))
    torch.testing.assert_close(found[:2], torch.tensor(EXPECTED["sequence-mean"]), atol=1e-7, rtol=0)
    assert [s.sample_id for s in build(one_rank, replace(empty, branches=empty.branches[:1]), OTHER)[0]] == [1]


def test_a_batch_that_only_keeps_others_company_counts_no_sample(one_rank: ParallelGroups) -> None:
    (first, *_), step = build(one_rank, BRANCHED, OTHER)
    idle = replace(without_loss(collate([first], "cpu")), step=step, advantages=torch.zeros(3), entropy=torch.zeros(3))
    scored = replace(idle, current_logprobs=torch.zeros(3), old_logprobs=torch.zeros(3))
    assert replace(PLAIN, aggregation="sequence-mean")(scored)[1] == 0


def test_gspo_has_a_ratio_of_each_sequence(one_rank: ParallelGroups) -> None:
    """log(current / old) of 1 is ln 1.21, of 2 is 0, of 3 is ln 2: 1.1 in the first sequence, 2 in the branch, else 1.

    Clipped at 1.28: -(2 x 1.1 + 1.28) / 3 + 1, over 2 samples. One ratio of the sample, (1.21 x 2) ** (1/3) = 1.34,
    would clip all three tokens.
    """
    samples, step = build(one_rank, BRANCHED, OTHER)
    loss = gspo.Loss(clamp_eps_lower=0.2, clamp_eps_upper=0.28)
    objective = replace(PLAIN, loss=loss, aggregation="sequence-mean")
    value, found = gradient(objective, step, list(samples), shift={1: math.log(1.21), 3: math.log(2)})
    assert value == pytest.approx((-(2 * 1.1 + 1.28) / 3 + 1) / 2, abs=1e-6)
    # The branch, 3 after 1, is clipped. After 0: -1.1/6 (one-hot of 1 - 1/4) + 1/2 (one-hot of 2 - 1/4); after 1 of 2.
    one, two = torch.eye(4)[1] - 0.25, torch.eye(4)[2] - 0.25
    torch.testing.assert_close(found[:2], torch.stack([-1.1 / 6 * one + two / 2, -1.1 / 6 * two]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        # old / engine: 2 and 1 in the first sequence, 1/2 in the branch; of the whole sample it would be 1.
        ("sequence_tis", {"cap": 9.0}, [2.0, 2.0, 0.5, 1.0]),
        ("geometric", {"lower": 0.6, "upper": 1.5}, [1.0, 1.0, 0.0, 1.0]),
        ("veto", {"veto": 0.6}, [1.0, 1.0, 0.0, 1.0]),
        ("token_tis", {"cap": 9.0}, [2.0, 1.0, 0.5, 1.0]),
        ("masked_is", {"lower": 0.6, "upper": 1.5}, [0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_corrections_take_each_sequence_for_itself(
    one_rank: ParallelGroups, name: str, options: dict[str, float], weights: list[float]
) -> None:
    samples, _ = build(one_rank, BRANCHED, OTHER)
    batch = collate(samples, "cpu")
    gap = torch.tensor([0.0, math.log(2), 0.0, 0.0, 0.0, -math.log(2), 0.0, 0.0])
    found, _ = correction(name, **options)(replace(batch, old_logprobs=batch.inference_logprobs + gap))
    torch.testing.assert_close(found[batch.in_loss], torch.tensor(weights))


def test_advantages_of_outcomes_count_a_sample_once_and_its_tokens_all(one_rank: ParallelGroups) -> None:
    """Of samples 1 and -1: std sqrt(2). Of tokens 1 1 1 -1: mean .5, std 1."""
    samples, step = build(one_rank, BRANCHED, OTHER)
    batch = replace(collate(samples, "cpu"), step=step)
    written = batch.in_loss
    for advantage, expected in (
        (grpo.Advantage(), [0.5**0.5] * 3 + [-(0.5**0.5)]),
        (reinforce_plus_plus.Advantage(), [0.5] * 3 + [-1.5]),
    ):
        torch.testing.assert_close(advantage(batch)[0][written], torch.tensor(expected), atol=1e-5, rtol=0)


def test_gae_ends_every_sequence_with_the_reward(one_rank: ParallelGroups) -> None:
    """gamma 1/2, lambda 1, values 0: each token's advantage is the reward, halved for each written one behind it.

    The branch hangs on token 1, but that token's future is the sequence it is trained in: 1/2, and not 1/2 + 1/2.
    """
    samples, step = build(one_rank, BRANCHED, OTHER)
    ends = torch.tensor([8.0, 16.0, 32.0])
    batch = changed(collate(samples, "cpu"), step=step, values=torch.zeros(8), end_values=ends)
    assert batch.rewards.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, -1.0]
    whole = {"gamma": 0.5, "gae_lambda": 1.0}
    assert gae.Advantage(**whole)(batch)[0][batch.in_loss].tolist() == [0.5, 1.0, 1.0, -1.0]
    # The branch alone was cut: 1 + 16 / 2.
    cut = changed(batch, truncated=torch.tensor([False, True, False]))
    found, _ = gae.Advantage(**whole, bootstrap_truncated=True)(cut)
    assert found[batch.in_loss].tolist() == [0.5, 1.0, 9.0, -1.0]


def test_kl_in_the_reward_is_taken_off_every_written_token_once(one_rank: ParallelGroups) -> None:
    samples, step = build(one_rank, BRANCHED, OTHER)
    batch = replace(collate(samples, "cpu"), step=step)
    judged, _ = with_kl_in_reward(replace(batch, old_logprobs=torch.full((8,), 0.5), ref_logprobs=torch.zeros(8)), 0.1)
    expected = [-0.05, 0.95, 0.95, -1.05]
    torch.testing.assert_close(judged.rewards[batch.in_loss], torch.tensor(expected))


def test_every_token_of_a_step_has_a_place_of_its_own(one_rank: ParallelGroups) -> None:
    """Clip-Cov and KL-Cov pick tokens by it. Sequence 0 has those of a sample without branches."""
    samples, step = build(one_rank, BRANCHED, OTHER)
    batch = replace(collate(samples, "cpu"), step=step)
    found = places(batch)
    assert found.unique().numel() == 8
    assert found[[0, 1, 2, 6, 7]].tolist() == [0, 1, 2, 1 << 32, (1 << 32) + 1]


def test_the_advantage_of_a_sample_is_over_all_its_tokens(one_rank: ParallelGroups) -> None:
    """1 and 3 in the first sequence, 8 in the branch, -1 in the other sample: means 4 and -1."""
    (first, branch, other), step = build(one_rank, BRANCHED, OTHER)

    def with_advantages(samples: list[Sample], values: list[float]) -> TokenBatch:
        return replace(collate(samples, "cpu"), step=step, advantages=torch.tensor(values))

    updates = [[with_advantages([branch, other], [0, 0, 8, 0, -1]), with_advantages([first], [0, 1, 3])]]
    assert advantage_metrics(updates, one_rank.data_group) == {
        "critic/advantages/mean": 1.5, "critic/advantages/max": 4.0, "critic/advantages/min": -1.0,
    }  # fmt: skip
    assert sequence_advantages(updates[0][0]) == {(0, 1): 8.0, (1, 0): -1.0}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_conversation_as_one_sequence_or_as_two_is_one_gradient(one_rank: ParallelGroups, kind: str) -> None:
    """P | A0 A1 R B0 B1 with R read, or P | A0 A1 and the branch P A0 A1 R | B0 B1: the same written tokens."""
    whole = sample_of(1.0, ([3, 4], drawn([5, 6, 7, 8, 9], environment_spans=((2, 3),))))
    parts = sample_of(1.0, ([3, 4], drawn([5, 6])), ([3, 4, 5, 6, 7], drawn([8, 9])))
    other = sample_of(-1.0, ([3, 4], drawn([6, 5, 4, 3])))
    found = []
    for rollout in (whole, parts):
        setup = Setup(one_rank, objective=replace(PLAIN, aggregation=kind))
        samples, step = build(one_rank, rollout, other)
        setup.trainer.step([[collate(samples, "cpu")]], step)
        found.append(gradients_of(setup.optimization))
    for one, two in zip(*(gradients.values() for gradients in found), strict=True):
        assert (one - two).abs().max() <= 1e-5 * one.abs().max()
        assert one.abs().max() > 0


def test_a_sample_of_several_sequences_weighs_as_one_sample_does(one_rank: ParallelGroups) -> None:
    """Under token-mean its sequences might as well be samples of their own; under sequence-mean not: 1/3 is not 1/2."""
    samples, step = build(one_rank, BRANCHED, OTHER)
    alone = [replace(one, sample_id=n, sequence=0, tokens_elsewhere=0) for n, one in enumerate(samples)]
    for kind, is_equal in (("token-mean", True), ("sequence-mean", False)):
        objective = replace(PLAIN, aggregation=kind)
        together, apart = gradient(objective, step, list(samples)), gradient(objective, rewards_of(alone), alone)
        assert torch.equal(together[1], apart[1]) is is_equal
