"""Experts: a router beyond softmax, layers without experts, and experts that every token goes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_rl.config.flags import Finding, flags_of, nearest_multiples, without_effect
from megatron_rl.errors import Problem
from megatron_rl.families.architecture import MOST_EXPERTS, expert_layers
from megatron_rl.families.shape import ExpertOptions

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

_OF_ROUTERS = (
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_grouped_gemm",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
)  # fmt: skip
"""Flags of `ModelConfig` that only experts have."""


def expert_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report settings that experts need, and that they cannot be combined with."""
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    if model.num_experts is None:
        for name in (*_OF_ROUTERS, *(each.name for each in flags_of(ExpertOptions))):
            if name in config.typed:
                given = f"--{name.replace('_', '-')}"
                what = f"{given} without --num-experts: dense layers have no router; add it, or leave out {given}"
                yield Problem(given, what)
        return
    yield from _router_problems(config)
    yield from _pattern_problems(config)
    yield from _shared_problems(config)
    if model.num_experts * (model.num_layers or 0) > MOST_EXPERTS:
        yield "num_experts", (
            f"in each of {model.num_layers} layers are more than the {MOST_EXPERTS:,} experts that a model may have"
        )
    if model.add_bias_linear and config.parallel.expert_tensor_parallel_size != 1:
        yield "num_experts", (
            "with biases of linear layers needs experts that no ranks cut; use --expert-tensor-parallel-size 1 "
            f"--expert-model-parallel-size {parts}, or --disable-bias-linear"
        )
    if parts > 1 and not config.parallel.sequence_parallel:
        yield "num_experts", (
            f"with --tensor-model-parallel-size {parts} needs --sequence-parallel in training; add it"
        )
    if "mlp" in (config.kernels.recompute_modules or ()):
        yield "recompute_modules", "with --num-experts: there is no dense MLP to recompute; use core_attn, or full"


def _router_problems(config: RLConfig) -> Iterator[Finding]:
    model, by_softmax = config.model, config.experts.moe_router_score_function == "softmax"
    kind, weight, most = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, model.num_experts
    if model.moe_router_topk > most:
        yield "moe_router_topk", f"is more than --num-experts {most}; use at most {most}"
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax and by_softmax:
        yield "moe_router_topk", (
            "gives the chosen expert the weight 1, so the router would learn nothing; add --moe-router-pre-softmax"
        )
    if weight and kind == "none":
        yield "moe_aux_loss_coeff", "has no loss to weigh; add --moe-router-load-balancing-type seq_aux_loss or such"
    if kind != "none" and not weight:
        yield "moe_router_load_balancing_type", "has no effect without a weight; add --moe-aux-loss-coeff 0.001"
    if model.moe_router_pre_softmax and not by_softmax:
        yield "moe_router_pre_softmax", "has no effect with --moe-router-score-function sigmoid; leave it out"
    if config.experts.moe_router_enable_expert_bias and by_softmax:
        text = "needs scores between 0 and 1, as megatron-core does; add --moe-router-score-function sigmoid"
        yield "moe_router_enable_expert_bias", text
    yield from _group_problems(config, by_softmax)


def _group_problems(config: RLConfig, by_softmax: bool) -> Iterator[Finding]:
    """Choices of groups that are built alike here, in megatron-core and in the models' own code."""
    experts, groups, chosen = (
        config.model.num_experts, config.experts.moe_router_num_groups, config.experts.moe_router_group_topk
    )  # fmt: skip
    if groups is None or chosen is None:
        if groups is not None:
            yield "moe_router_num_groups", "needs to know how many of them a token uses; add --moe-router-group-topk"
        elif chosen is not None:
            yield "moe_router_group_topk", "has no effect without --moe-router-num-groups; add it"
        return
    if by_softmax:
        yield "moe_router_num_groups", "is built for sigmoid scores; add --moe-router-score-function sigmoid"
    if experts % groups or experts < 2 * groups:
        yield "moe_router_num_groups", (
            f"does not divide --num-experts {experts} into groups of two experts or more; use another number"
        )
    elif chosen > groups or config.model.moe_router_topk > chosen * (experts // groups):
        yield "moe_router_group_topk", (
            f"of {groups} groups of {experts // groups} experts cannot give --moe-router-topk "
            f"{config.model.moe_router_topk} experts; use another number"
        )
    if config.model.moe_router_topk // chosen != 2:
        # megatron-core takes as many as that of a group for its score; DeepSeek's and GLM's own code takes two.
        yield "moe_router_group_topk", (
            f"goes into --moe-router-topk {config.model.moe_router_topk} "
            f"{config.model.moe_router_topk // chosen} times, not twice: megatron-core would choose other groups than "
            "the model was trained with"
        )


def _pattern_problems(config: RLConfig) -> Iterator[Finding]:
    if config.model.num_layers is None:
        return
    try:
        layers = expert_layers(config.experts.moe_layer_freq, config.model.num_layers)
    except ValueError as error:
        yield "moe_layer_freq", f"{error}; use 1, or a list with a 0 or 1 for each layer"
        return
    if not any(layers):
        yield "moe_layer_freq", "gives no layer experts; leave out --num-experts and --moe-layer-freq"


def _shared_problems(config: RLConfig) -> Iterator[Finding]:
    width, parts = config.experts.moe_shared_expert_intermediate_size, config.parallel.tensor_model_parallel_size
    if width is None:
        yield from without_effect(config, ["moe_shared_expert_gate"], "--moe-shared-expert-intermediate-size")
        return
    if config.model.add_bias_linear:
        text = "with biases of linear layers is not built: add --disable-bias-linear"
        yield "moe_shared_expert_intermediate_size", text
    if width % parts:
        text = f"is not divisible by tensor-parallel size {parts}: each rank holds an equal share"
        yield "moe_shared_expert_intermediate_size", f"{text}; use {nearest_multiples(width, parts)}"
