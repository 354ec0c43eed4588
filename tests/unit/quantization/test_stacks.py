"""Quantised copies of stacked experts are those of single ones: the same codes, rollouts, gradients and refusals."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import QuantizationError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.quantization.audit import LayerAudit
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.generation import rollout_engine
from tests.support.quantized import (
    INT4,
    QUANTIZING,
    complete,
    disturb,
    held_bytes,
    linears_of,
    rollout_quantization,
    short_requests,
)
from tests.support.samples import random_samples
from tests.support.tiny import SHAPES, tiny_config, tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")
Pair = tuple[PolicyModel, PolicyModel]


def pair_of(**changes: object) -> Pair:
    """Of one seed: a loop over the experts, and a stack."""
    shape = SHAPES["experts"] | changes
    return tuple(tiny_policy(tiny_config(**shape | loop)) for loop in ({"no_moe_grouped_gemm": True}, {}))


@pytest.fixture
def pair() -> Pair:
    return pair_of()


def names(linears: QuantizedLinears) -> list[str]:
    return [layer.name for layer in linears.layers]


@pytest.mark.parametrize(
    ("recipe", "bf16"),
    [(recipe, False) for recipe in (*QUANTIZING, INT4)] + [(recipe, True) for recipe in ("int8", "int8_smooth", "fp8")],
)
def test_rollouts_draw_the_same(recipe: str, bf16: bool) -> None:
    """Tokens, log-probs to the bit, and the audit's table; int8_smooth with the same calibration of each expert."""
    found = []
    for policy in pair_of(bf16=bf16):
        audits: list[list[LayerAudit]] = []
        quantization = rollout_quantization(policy, recipe, audits)
        found.append((complete(policy, rollout_engine(policy), quantization, short_requests()), audits))
        disturb(policy, 0.2)
        quantization.weights_changed()
        found[-1] += (complete(policy, rollout_engine(policy), quantization, short_requests()),)
    loop, stack = found
    assert stack == loop
    assert stack[0] != stack[2], "the copies of the first weights"
    assert {row.ran for row in stack[1][0]} == {RECIPES.get(recipe).format}


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_the_same_bytes(pair: Pair, recipe: str) -> None:
    loop, stack = (linears_of(policy, recipe) for policy in pair)
    assert sorted(names(stack)) == sorted(names(loop))
    assert (stack.stored_bytes, stack.num_weights) == (loop.stored_bytes, loop.num_weights)


def test_memory_is_given_up_and_taken_again(pair: Pair) -> None:
    linears = linears_of(pair[1], "fp8")
    linears.refresh()
    held = held_bytes(linears)
    before = [linears.recipe.dequantize(layer.weight).clone() for layer in linears.layers]
    linears.release()
    scales = sum(layer.weight.scales.nbytes for layer in linears.layers)
    assert held_bytes(linears) == scales < held / 10
    with linears.installed():
        assert held_bytes(linears) == held
        after = [linears.recipe.dequantize(layer.weight) for layer in linears.layers]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize(("recipe", "both"), [("int8", False), ("fp8_block", False), ("fp8_block", True)])
def test_aligned_training_has_the_same_gradients(pair: Pair, one_rank: object, recipe: str, both: bool) -> None:
    batch, found = collate(random_samples(6), "cpu"), []
    for policy in pair:
        scorer = Scorer(policy, one_rank, 1.0)
        with linears_of(policy, recipe, quantizes_gradients=both).installed():
            logprobs = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
            logprobs.sum().backward()
        experts = policy.gpt.decoder.layers[0].mlp.experts
        weights = [getattr(one, name).weight for one in getattr(experts, "local_experts", [experts])
                   for name in ("linear_fc1", "linear_fc2")]
        found.append((logprobs.detach(), [weight.grad for weight in weights]))
    (loop, singles), (stack, stacks) = found
    assert torch.equal(stack, loop)
    for number in (0, 1):
        assert torch.equal(stacks[number], torch.stack(singles[number::2]))


def test_an_expert_that_is_not_finite_is_named(pair: Pair) -> None:
    linears = linears_of(pair[1])
    with torch.no_grad():
        pair[1].gpt.decoder.layers[1].mlp.experts.linear_fc2.weight[2, 5, 3] = torch.nan
    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.experts\.local_experts\.2\.linear_fc2 holds NaN"):
        linears.refresh()


@pytest.mark.parametrize("skip", ["*.linear_fc2", "layers.0.mlp.experts.*"])
def test_whole_stacks_may_be_skipped(pair: Pair, skip: str) -> None:
    found = []
    for policy in pair:
        audits: list[list[LayerAudit]] = []
        quantization = rollout_quantization(policy, "int8", audits, [skip])
        found.append((complete(policy, rollout_engine(policy), quantization, short_requests()), audits))
        assert len(quantization.linears.plain) == 8
    assert found[0] == found[1]


def test_a_part_of_a_stack_cannot_be_skipped(pair: Pair) -> None:
    with pytest.raises(QuantizationError, match="local_experts.0.linear_fc1 is to be quantised and others are not"):
        linears_of(pair[1], skip=["*.local_experts.3.*"])
