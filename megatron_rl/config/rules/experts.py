"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.wording import Rule, nearest_multiples
from megatron_rl.families.architecture import MOST_EXPERTS

_ONLY_WITH_EXPERTS = ("moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax")


def _without_experts(config: RLConfig) -> Iterator[str]:
    if config.model.num_experts is not None:
        return
    for name in _ONLY_WITH_EXPERTS:
        if name in config.typed:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} without --num-experts: dense layers have no router; add it, or leave out {flag}"


def _router(config: RLConfig) -> Iterator[str]:
    model = config.model
    if model.moe_router_load_balancing_type != "none":
        yield (
            f"--moe-router-load-balancing-type {model.moe_router_load_balancing_type} is not built yet in this "
            "version: the loss is the policy's alone; use none"
        )
    if model.num_experts is not None and model.num_experts * (model.num_layers or 0) > MOST_EXPERTS:
        yield (
            f"--num-experts {model.num_experts} in each of {model.num_layers} layers are more than the "
            f"{MOST_EXPERTS:,} experts that a model may have; use fewer experts or layers"
        )
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield (
            f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {model.num_experts}; use at most "
            f"{model.num_experts}"
        )


def _built(config: RLConfig) -> Iterator[str]:
    """What experts cannot be combined with."""
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    if model.num_experts is None:
        return
    if model.add_bias_linear:
        yield "--num-experts with biases of linear layers is not built: add --disable-bias-linear"
    if parts > 1 and not config.parallel.sequence_parallel:
        yield (
            f"--num-experts with --tensor-model-parallel-size {parts} needs --sequence-parallel in training: each rank "
            "would route every token again; add it"
        )
    if model.moe_ffn_hidden_size is not None and model.moe_ffn_hidden_size % parts:
        yield (
            f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size} is not divisible by tensor-parallel size {parts}: each "
            f"rank holds an equal share; use {nearest_multiples(model.moe_ffn_hidden_size, parts)}"
        )
    if "mlp" in (config.kernels.recompute_modules or ()):
        yield "--recompute-modules mlp with --num-experts: there is no dense MLP to recompute; use core_attn, or full"


RULES: tuple[Rule, ...] = (_without_experts, _router, _built)
