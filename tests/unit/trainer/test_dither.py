"""Main parameters of bf16 training begin anywhere among what rounds to the weights: small updates have an effect."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.trainer.optimizer import Optimization, dithered
from tests.support.samples import tiny_optimization

WEIGHTS = (0.02 * torch.randn(200_000, generator=torch.Generator().manual_seed(1))).bfloat16()
STEP = torch.ldexp(torch.ones(len(WEIGHTS)), torch.frexp(WEIGHTS.float()).exponent - 8)
"""From a weight to the next bf16 number."""


def test_they_round_to_the_weights():
    assert torch.equal(dithered(WEIGHTS).bfloat16(), WEIGHTS)


def test_they_are_spread_over_the_whole_interval():
    """Uniform from -1/2 to 1/2 of a step: mean 0, variance 1/12."""
    places = (dithered(WEIGHTS) - WEIGHTS.float()) / STEP
    assert places.mean().abs() < 0.01
    assert places.var() == pytest.approx(1 / 12, rel=0.02)


@pytest.mark.parametrize("update", [0.02, 0.1, 0.2])
def test_the_mean_change_is_the_update(update: float):
    """In steps of bf16; from the middle of the intervals all of these would change nothing."""
    assert torch.equal((WEIGHTS.float() + update * STEP).bfloat16(), WEIGHTS)
    changed = (dithered(WEIGHTS) + update * STEP).bfloat16().float() - WEIGHTS.float()
    assert (changed / STEP).mean() == pytest.approx(update, abs=0.01)


def test_zeros_and_what_is_not_finite_stay():
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")]).bfloat16()
    assert dithered(odd).tolist()[:4] == [0.0, -0.0, float("inf"), float("-inf")]
    assert dithered(odd)[4].isnan()


@pytest.mark.parametrize("distributed", [False, True])
def test_one_small_update_changes_one_weight_in_so_many(one_rank: object, distributed: bool):
    """By 1/20 of a step of bf16 each: 5 % of the weights with dithering, none without, and none before the update."""
    shares = [_share_changed(use_distributed_optimizer=distributed, no_dither_main_params=off) for off in (False, True)]
    assert shares[0] == pytest.approx(0.05, abs=0.01)
    assert shares[1] == 0


def test_an_optimizer_that_begins_again_is_dithered_again(one_rank: object):
    optimization = tiny_optimization(bf16=True)
    weight = optimization.policy.gpt.output_layer.weight
    first = weight.main_param.clone()
    weight.main_param.zero_()
    optimization.reload_main_parameters()
    assert torch.equal(weight.main_param, first)
    assert not torch.equal(first.view(-1), weight.float().view(-1))


def test_fp32_parameters_have_no_copy_to_dither(one_rank: object):
    plain, dithering = (_weight(tiny_optimization(no_dither_main_params=off)) for off in (True, False))
    assert torch.equal(plain, dithering)


def _share_changed(**flags: bool) -> float:
    """Of the weights of a matrix, after an update of each by 1/20 of its step."""
    optimization = tiny_optimization(bf16=True, **flags)
    weight = _weight(optimization)
    before = weight.detach().clone()
    step = torch.ldexp(torch.ones(weight.shape), torch.frexp(weight.float()).exponent - 8)
    weight.main_param.data.view(-1).add_(0.05 * step.view(-1))
    for part in optimization.optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    optimization.gather_parameters()
    return float((weight != before).float().mean())


def _weight(optimization: Optimization) -> torch.Tensor:
    return optimization.policy.gpt.output_layer.weight
