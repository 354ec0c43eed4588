"""Clip-Cov and KL-Cov: which tokens of an update are picked, and what becomes of them, on numbers worked out by hand.

Four loss tokens, in samples 0 and 1: advantages 3, 0, 0, 1 (mean 1), log-probs -1, -2, -0.5, -0.5 (mean -1):

    (A - mean)(log-prob - mean)    2 * 0 = 0     -1 * -1 = 1     -1 * 0.5 = -0.5     0 * 0.5 = 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.covariance import TokenSelection, covariance, moments, places
from megatron_rl.algorithms.losses import clip, clip_cov, kl_cov
from megatron_rl.errors import ConfigError
from megatron_rl.platform.groups import ParallelGroups
from tests.distributed.pick_programs import parts_of, selected
from tests.support.ranks import run_ranks
from tests.support.tokens import step_rewards, token_batch

ADVANTAGES = [9.0, 3.0, 0.0, 9.0, 0.0, 1.0]
LOGPROBS = [7.0, -1.0, -2.0, 7.0, -0.5, -0.5]
MASK = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
STEP = step_rewards(torch.tensor([1.0, 0.0]), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))


def batch_of(
    advantages: Sequence[float] = ADVANTAGES, logprobs: Sequence[float] = LOGPROBS, **further: Any
) -> TokenBatch:
    return token_batch(
        [0, 0, 0, 1, 1, 1], MASK, advantages=torch.tensor(advantages), inference_logprobs=torch.tensor(logprobs),
        position_ids=torch.tensor([0, 1, 2, 0, 1, 2]), step=STEP, **further,
    )  # fmt: skip


def pick(loss: TokenSelection, groups: ParallelGroups, batch: TokenBatch) -> TokenBatch:
    (found,) = selected(loss, [batch], groups)
    return found


def test_the_covariance_is_of_the_whole_update() -> None:
    batch = batch_of()
    sums = moments(batch)
    assert sums.tolist() == [4.0, 4.0, -4.0]
    assert covariance(batch, sums).tolist() == [-math.inf, 0.0, 1.0, -math.inf, -0.5, 0.0]
    # Of a larger update whose means are 0 and -2.
    assert covariance(batch, torch.tensor([8.0, 0.0, -16.0])).tolist() == [-math.inf, 3, 0, -math.inf, 0, 1.5]


def test_a_log_prob_that_is_not_finite_is_not_picked_and_spoils_no_mean() -> None:
    batch = batch_of(logprobs=[7.0, -1.0, math.nan, 7.0, -0.5, -0.5])
    assert moments(batch).tolist() == [3.0, 4.0, -2.0]
    assert covariance(batch, moments(batch))[2] == -math.inf


@pytest.mark.parametrize(("share", "expected"), [(0.1, [2]), (0.5, [1, 2]), (0.75, [1, 2, 5]), (1.0, [1, 2, 4, 5])])
def test_kl_cov_picks_the_largest_and_of_equals_the_first(
    one_rank: ParallelGroups, share: float, expected: list[int]
) -> None:
    """0.1 of 4 tokens is none, and one is picked all the same."""
    found = pick(kl_cov.Loss(share=share), one_rank, batch_of())
    assert found.selected.nonzero()[:, 0].tolist() == expected


def test_kl_cov_adds_the_distance_at_picked_tokens_alone() -> None:
    # Token 1 (A = 3) at ratio 2, token 2 (A = 0) at 0.5, token 4 (A = 0) at 2, token 5 (A = 1) at 4; 2 and 5 are
    # picked: -6, 0 + 2 ln 2, 0, -4 + 2 ln 4.
    shift = torch.tensor([0.0, 2.0, 0.5, 0.0, 2.0, 4.0]).log().nan_to_num(neginf=0.0)
    old = torch.tensor(LOGPROBS)
    current = (old + shift).requires_grad_()
    marked = torch.tensor([False, False, True, False, False, True])
    loss, sums = kl_cov.Loss(beta=2.0)(batch_of(current_logprobs=current, old_logprobs=old, selected=marked))
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([0.0, -6.0, 2 * math.log(2), 0.0, 0.0, 4 * math.log(2) - 4]))
    # d(-rho A) = -rho A; d|log rho| = -1 below 1, where the log-prob is pulled back up, and 1 above.
    torch.testing.assert_close(current.grad, torch.tensor([0.0, -6.0, -2.0, 0.0, 0.0, 2.0 - 4.0]))
    assert sums["actor/picked_tokens"].sum() == 2


def test_clip_cov_picks_within_its_bounds(one_rank: ParallelGroups) -> None:
    for lower, upper, expected in ((0.5, 2.0, [2]), (-1.0, 0.5, [1, 4, 5]), (1.0, 2.0, []), (-2.0, -0.5, [])):
        found = pick(clip_cov.Loss(share=1.0, lower=lower, upper=upper), one_rank, batch_of())
        assert found.selected.nonzero()[:, 0].tolist() == expected


def test_clip_cov_takes_the_loss_of_picked_tokens_away() -> None:
    current = torch.tensor(LOGPROBS, requires_grad=True)
    marked = torch.tensor([False, True, False, False, False, False])
    batch = batch_of(current_logprobs=current, old_logprobs=current.detach(), selected=marked)
    loss, sums = clip_cov.Loss()(batch)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, -1.0]
    assert current.grad.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, -1.0]
    assert sums["actor/picked_tokens"].sum() == 1
    assert clip.Loss()(batch)[0].tolist() == [0.0, -3.0, 0.0, 0.0, 0.0, -1.0]


def test_clip_cov_draws_anew_after_every_update(one_rank: ParallelGroups) -> None:
    """Of 600 tokens within the bounds a tenth, other ones for other versions of the policy."""
    found = []
    for version in (0, 0, 1):
        ((batch,),) = parts_of(packs=1)
        batch.versions.fill_(version)
        loss = clip_cov.Loss(share=0.1, lower=-1e9, upper=1e9)
        found.append(pick(loss, one_rank, batch).selected)
    assert [mask.sum().item() for mask in found] == [60, 60, 60]
    assert torch.equal(found[0], found[1])
    assert (found[0] & found[2]).sum() < 20


def test_bounds_that_leave_no_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower=5 is not below upper=5; no token could be picked"):
        clip_cov.Loss(lower=5.0)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_packing_and_ranks_change_nothing(one_rank: ParallelGroups, name: str) -> None:
    """The same tokens are picked in one micro-batch, in three, and on two ranks, of which one has two of the three."""
    loss = {"clip_cov": clip_cov.Loss(share=0.05, lower=0.1), "kl_cov": kl_cov.Loss(share=0.05)}[name]

    def numbers(updates: Sequence[Sequence[TokenBatch]]) -> set[int]:
        (part,) = updates
        return {number for batch in part for number in places(batch)[batch.selected].tolist()}

    whole = numbers([selected(loss, part, one_rank) for part in parts_of(packs=1)])
    assert len(whole) == 30
    assert numbers([selected(loss, part, one_rank) for part in parts_of(packs=3)]) == whole
    reports = run_ranks("tests.distributed.pick_programs:picked_on_each_rank", 2, name=name)
    assert set(reports[0]) | set(reports[1]) == whole
    assert len(reports[0]) + len(reports[1]) == len(whole)
