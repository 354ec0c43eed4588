"""What `test_engine_experts` runs, in a process whose Transformer Engine is the fake one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformer_engine as fake

from megatron_rl.checkpoint.stored import load_weights
from megatron_rl.checkpoint.tensors import load, save_tensors
from megatron_rl.families.layout import own_name
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.trainer.optimizer import Optimization
from tests.parity.transformer_engine_case import (
    ENGINE,
    FP8,
    INT8,
    STEPS,
    fp8,
    gradients,
    hugging_face,
    made,
    quantised,
    step,
    steps,
)
from tests.support.foreign import write_ranks
from tests.support.generation import generate, ragged_requests, rollout_engine
from tests.support.quantized import quantizable_policy, roll_out, rollout_quantization, short_requests
from tests.support.scoring import gaps, packed
from tests.support.tiny import MIXED, single_thread, tiny_config, tiny_policy

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "qk_layernorm": True}
"""As in Qwen3-MoE."""
SHARED = MIXED | {"moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True}
"""A dense layer, then experts, some of them shared."""
BIASED = {"num_experts": 4, "moe_ffn_hidden_size": 32, "disable_bias_linear": False}
"""With biases of all linears."""


def on_rank() -> dict[str, Any]:
    """Everything that can be compared, as numbers."""
    single_thread()
    groups = initialize(tiny_config().parallel, current_platform())
    shapes = {"experts": EXPERTS, "shared": SHARED, "biased": BIASED}
    report: dict[str, Any] = {"same": {name: _same_model(groups, shape) for name, shape in shapes.items()}}
    report["fp8"] = _watched(fp8, groups, **EXPERTS)
    report["steps"] = steps(groups, STEPS | {"replay": INT8 | {"bf16": True, "rl_router_replay": True}}, **SHARED)
    report["hf"] = hugging_face(
        groups, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    )
    report["quantised"] = {recipe: quantised(groups, recipe, **EXPERTS) for recipe in ("int8", "fp8_block_pow2")}
    report["padded"] = {recipe: _pads(recipe) for recipe in ("none", "int8")}
    shut_down()
    return report


def on_expert_rank() -> dict[str, Any]:
    """Of two ranks that have half of the experts each: steps of both kinds of layers, and of fp8."""
    single_thread()
    shape = EXPERTS | {"expert_model_parallel_size": 2}
    groups = initialize(tiny_config(2, **shape).parallel, current_platform())
    report = {"local": steps(groups, {"fp32": {"transformer_impl": "local"}}, **shape)}
    report["engine"] = steps(groups, {"fp32": {}, "int8": INT8}, **shape)
    report["fp8"] = _watched(steps, groups, {"fp8": FP8}, **shape)
    shut_down()
    return report


def _watched(program: Any, *given: Any, **named: Any) -> dict[str, Any]:
    """The report of ``program``, and of its grouped products how many were in fp8, and how many were not."""
    fake.GROUPED.clear()
    report = program(*given, **named)
    seen = [is_fp8 for is_fp8, _ in fake.GROUPED]
    return report | {"in fp8": seen.count(True), "not in fp8": seen.count(False)}


def _pads(recipe: str) -> bool:
    """Whether a rollout of a model that trains in fp8 pads the tokens of experts."""
    policy = tiny_policy(tiny_config(**FP8, **EXPERTS))
    fake.PADDED.clear()
    roll_out(policy, rollout_engine(policy), rollout_quantization(policy, recipe), short_requests(2))
    return EXPERTS["num_experts"] in fake.PADDED


def _same_model(groups: ParallelGroups, shape: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of local layers in Transformer Engine's, and the way back with an optimizer's state."""
    local, other = quantizable_policy(**shape), tiny_policy(tiny_config(**ENGINE, **shape), seed=2)
    requests = ragged_requests(4, num_samples=2, max_new_tokens=12, greedy=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # of what is converted
        save_tensors(made(folder, "weights"), local, None)
        load(Path(folder, "weights"), other)
        named = tiny_policy(tiny_config(**ENGINE, **shape), seed=3)
        load_weights(write_ranks(Path(folder), local, None), named, groups)
        report: dict[str, Any] = {"loaded": max(_apart(local, other), _apart(local, named))}
        fake.GROUPED.clear()
        completions = [generate(policy, rollout_engine(policy), requests) for policy in (local, other)]
        report |= {"tokens": [[list(c.token_ids) for group in each for c in group] for each in completions]}
        report |= {"in rollouts": len(fake.GROUPED), "gap": 0.0}
        batch = packed(requests, completions[0])
        ours, theirs = (
            {own_name(name): gradient for name, gradient in gradients(policy, groups, batch).items()}
            for policy in (local, other)
        )
        report |= {"in training": len(fake.GROUPED), "same names": list(sorted(ours)) == sorted(theirs)}
        trained = {name: gradient for name, gradient in ours.items() if gradient is not None}
        report["gradient"] = max((theirs[name] - trained[name]).abs().max().item() for name in trained)
        report["gap"] = gaps(other, groups, batch, 1.0).max().item()
        report["resumed"] = _resumed(local, other, Path(folder), shape)
    return report


def _resumed(local: PolicyModel, other: PolicyModel, folder: Path, shape: Mapping[str, Any]) -> float:
    """Train Transformer Engine's, resume with local layers, and take one more step with both: how far apart?"""
    flags = {"use_distributed_optimizer": True, "lr_decay_style": "constant", **shape}
    optimizations = [Optimization(other, tiny_config(**ENGINE, **flags)), Optimization(local, tiny_config(**flags))]
    step(optimizations[0], seed=1)
    save_tensors(made(folder, "all"), other, optimizations[0])
    load(folder / "all", local, optimizations[1])
    for optimization in optimizations:
        step(optimization, seed=2)
    return _apart(local, other)


def _apart(local: PolicyModel, other: PolicyModel) -> float:
    """The largest difference between parameters of one name."""
    ours, theirs = dict(local.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)
