"""Adapters on one rank: what they compute, what learns, and what rollouts, copies and the reference make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl import loop, supervised
from megatron_rl.config.lora import lora_of
from megatron_rl.models.adapters import adapters_in
from megatron_rl.models.lora import adapt, without_adapters
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.copies import weight_of
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.registry import RECIPES
from megatron_rl.run.memory.estimate import estimate
from megatron_rl.run.training import record_updates
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.lora import adapted, move_b
from tests.support.samples import random_samples
from tests.support.tiny import DELTA, DELTA_EXPERTS, VOCABULARY, tiny_config, tiny_policy
from tests.support.toy import toy_run

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "biases, some matrices": {"disable_bias_linear": False, "lora_targets": ["q_proj", "v_proj", "linear_fc2"]},
    "experts": EXPERTS,
    "experts, loop": EXPERTS | {"no_moe_grouped_gemm": True},
    "delta": DELTA,
    "delta, joint, some": DELTA_EXPERTS | {"lora_targets": ["in_proj_ba", "q_proj"]},
}


def test_by_hand(one_rank: ParallelGroups) -> None:
    """fc1 of a gated MLP with rank 1: gate rows take the first A, up rows the second, and s = alpha / rank = 3."""
    config = tiny_config(lora_rank=1, lora_alpha=3)
    policy = tiny_policy(config)
    adapt(policy, config, lora_of(config), one_rank)
    linear = parallel_linears(policy.gpt)["layers.0.mlp.linear_fc1"]
    a, b = linear.adapter.lora_a, linear.adapter.lora_b
    with torch.no_grad():
        b.copy_(torch.arange(1.0, 129.0)[:, None])
    x = torch.randn(5, 32)
    added = linear(x)[0] - x @ linear.weight.t()
    gate, up = (3 * (x @ a[i])[:, None] for i in (0, 1))
    expected = torch.cat([gate * torch.arange(1.0, 65.0), up * torch.arange(65.0, 129.0)], 1)
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_apart_is_as_merged_and_off_is_the_base(one_rank: ParallelGroups, changes: dict[str, Any]) -> None:
    config = tiny_config(lora_rank=4, **changes)
    scored, batch = Scorer(policy := tiny_policy(config), one_rank, 1.0), collate(random_samples(5), "cpu")
    before = scored.logprobs([batch])[0]
    adapt(policy, config, lora_of(config), one_rank)
    base = scored.logprobs([batch])[0]  # B is 0; megatron multiplies by a frozen head in another order of the sum
    torch.testing.assert_close(base, before, rtol=0, atol=1e-5)
    move_b(policy, one_rank)
    apart = scored.logprobs([batch])[0]
    with without_adapters(policy):
        assert torch.equal(scored.logprobs([batch])[0], base)
    assert torch.equal(scored.logprobs([batch])[0], apart)
    for module in {*parallel_linears(policy.gpt).values()}:
        if hasattr(module, "adapter"):
            is_stack, weight = module.weight.dim() == 3, module.weight
            merged = [weight_of(module, e) for e in range(len(weight))] if is_stack else [weight_of(module)]
            weight.data.copy_(torch.stack(merged) if is_stack else merged[0])
    with without_adapters(policy):
        torch.testing.assert_close(scored.logprobs([batch])[0], apart, rtol=0, atol=2e-5)
    assert (apart - base).abs().max() > 0.05


def test_only_adapters_have_gradients_moments_and_main_parameters(one_rank: ParallelGroups) -> None:
    config = tiny_config(lora_rank=2, bf16=True, use_distributed_optimizer=True)
    optimization = Optimization(adapted(tiny_policy(config), config, one_rank), config)
    owned = {id(p) for gpt in optimization.policy.chunks for adapter in adapters_in(gpt) for p in adapter.parameters()}
    parameters = list(optimization.policy.parameters())
    assert {id(p) for p in parameters if p.requires_grad} == owned
    assert {id(p) for p in parameters if hasattr(p, "main_grad")} == owned
    found, foreseen = sum(p.numel() for p in parameters), estimate(config, 1, VOCABULARY)
    assert foreseen.sizes.parameters_per_rank == found
    buffers = optimization.wrapped[0].buffers
    assert foreseen.gradients.update == sum(buffer.grad_data.nbytes for buffer in buffers)
    frozen = sum(p.nbytes for p in parameters if not p.requires_grad)
    assert foreseen.weights.update == frozen + sum(buffer.param_data.nbytes for buffer in buffers)
    assert foreseen.reference.host == 0


CASES: dict[str, dict[str, Any]] = {
    "unquantised": {"grpo_kl_beta": 0.1},
    "int8": {"rl_rollout_quantization": "int8", "bf16": True, "use_distributed_optimizer": True,
             "rl_offload_optimizer_during_inference": True},
    "aligned": {"rl_rollout_quantization": "int8", "rl_train_forward": "quantized", "grpo_kl_beta": 0.1},
    "aligned experts": EXPERTS | {"rl_rollout_quantization": "fp8", "rl_train_forward": "quantized"},
    "experts": EXPERTS,
}  # fmt: skip
LARGEST_GAP = {"int8": 0.3}
"""In nats, of two formats; where both sides run in one, what the order of a sum makes."""


@pytest.mark.parametrize("case", CASES)
def test_rollouts_follow_every_update(one_rank: ParallelGroups, case: str) -> None:
    """With copies of stale adapters the aligned gap of the third rollout would be as large as two updates."""
    run = toy_run(tiny_config(lora_rank=4, rl_max_new_tokens=8, **CASES[case]), one_rank)
    frozen = [(p, p.detach().clone()) for p in run.policy.parameters() if not p.requires_grad]
    gaps = []
    for step in (1, 2, 3):
        outcome = loop.rl_step(run, step)
        gaps.append(outcome.metrics["training/rollout_logprob_gap_max"])
        record_updates(run, outcome)
        if "actor/kl_loss" in outcome.metrics and "grpo_kl_beta" in CASES[case]:
            assert (outcome.metrics["actor/kl_loss"] > 1e-3) == (step > 1), "the reference is the base"
    run.closing.close()
    assert max(gaps) < LARGEST_GAP.get(case, 1e-5), gaps
    assert all(torch.equal(parameter, before) for parameter, before in frozen)
    assert all(bool(p.any()) for p in run.policy.parameters() if p.requires_grad and p.dim() == 2)


def test_supervised_training_learns(one_rank: ParallelGroups) -> None:
    config = tiny_config(perform_rl_step=False, lora_rank=4, lora_dropout=0.1, global_batch_size=8, lr=3e-2)
    run = toy_run(config, one_rank)
    losses = []
    for step in range(1, 7):
        losses.append(supervised.supervised_step(run, step).metrics["train/loss"])
    run.closing.close()
    assert losses[-1] < losses[0] - 0.3, losses


@pytest.mark.parametrize("name", ["layers.0.self_attention.linear_qkv", "layers.0.mlp.linear_fc2"])
def test_straight_through_without_dw(one_rank: ParallelGroups, name: str) -> None:
    """dB = s dW A^T and dA = s B^T dW, matrix by matrix, of the dW that is never formed: gradient^T x rounded input."""
    config = tiny_config(lora_rank=4)
    policy = adapted(tiny_policy(config), config, one_rank)
    linears = QuantizedLinears(policy.gpt, RECIPES.get("int8"))
    linears.refresh()
    copy = next(layer for layer in linears.layers if layer.name == name)
    adapter, x = copy.module.adapter, torch.randn(7, 1, copy.module.weight.shape[1])
    product, _ = copy.forward(x)
    slopes = torch.randn(product.shape)
    (slopes * product).sum().backward()
    seen, bias = copy.recipe.round_trip(x, copy.weight), copy.kind.added_bias(copy.module)
    bias = 0 if bias is None else bias
    assert adapter.scale == 8.0
    with torch.no_grad():
        torch.testing.assert_close(product, copy.recipe.matmul(x, copy.weight) + bias)
        dw = slopes[:, 0].t() @ seen[:, 0]
        rows = torch.cat([torch.full((count,), index) for index, count in adapter.parts[0].owners])
        for index, (a, of_a) in enumerate(zip(adapter.lora_a.split(4), adapter.lora_a.grad.split(4), strict=True)):
            own = rows == index
            b, of_b = adapter.lora_b[own], adapter.lora_b.grad[own]
            torch.testing.assert_close(of_a, 8 * b.t() @ dw[own], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(of_b, 8 * dw[own] @ a.t(), rtol=1e-4, atol=1e-3)
    assert copy.module.weight.grad is None
