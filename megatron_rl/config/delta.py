"""Layers with a recurrent state (gated delta rule), and attention with an output gate: Qwen3-Next, Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.flags import Finding, flag, flags_of, without_effect
from megatron_rl.families.architecture import linear_layers

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

_SIZES = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
_PLAIN = {
    "context_parallel_size": 1, "rl_share_prompts": False,
    "transformer_impl": "local", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "add_qkv_bias": False, "multi_latent_attention": False, "window_size": None,
    "softmax_type": "vanilla", "sandwich_norm": False, "post_norm": False, "qk_layernorm_across_heads": False,
    "scale_embedding": False,
}  # fmt: skip
"""Settings with the one value that is built with such layers."""


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5); --load-hf sets it from config.json."""

    linear_attention_freq: str | None = flag(None)
    """Which layers have a recurrent state (gated delta rule): N for all but every Nth, or a list with 1 for each of
    them, e.g. ([1]*3+[0]*1)*12. Default: none."""
    linear_conv_kernel_dim: int | None = flag(None, ge=2, le=64)
    """Tokens that the convolution before the delta rule reads, e.g. 4."""
    linear_key_head_dim: int | None = flag(None, ge=1, le=65_536)
    """Width of a query or key head of the delta rule, e.g. 128."""
    linear_value_head_dim: int | None = flag(None, ge=1, le=65_536)
    """Width of a value head of the delta rule, e.g. 128."""
    linear_num_key_heads: int | None = flag(None, ge=1, le=65_536)
    """Number of key heads of the delta rule, e.g. 16."""
    linear_num_value_heads: int | None = flag(None, ge=1, le=65_536)
    """Number of value heads of the delta rule, e.g. 32; a multiple of the key heads."""
    linear_joint_projections: bool = flag(False)
    """The published model joins the delta rule's query, key, value and gate into one matrix, and its strength and decay
    into another (Qwen3-Next); LoRA adapts these."""
    attention_output_gate: bool = flag(False)
    """Multiply the output of attention by a sigmoid of the layer's input."""


def delta_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Sizes that the delta rule needs, and what it is not built with."""
    delta = config.delta
    if delta.linear_attention_freq is None:
        yield from without_effect(config, [each.name for each in flags_of(DeltaConfig)][1:], "--linear-attention-freq")
        return
    missing = [name for name in _SIZES if getattr(delta, name) is None]
    for name in missing:
        yield name, "is missing: --linear-attention-freq has no default sizes"
    if not missing and delta.linear_num_value_heads % delta.linear_num_key_heads:
        yield "linear_num_value_heads", (
            f"is no multiple of --linear-num-key-heads {delta.linear_num_key_heads}: key heads are shared evenly"
        )
    ranks = config.parallel.tensor_model_parallel_size
    if not missing and delta.linear_num_key_heads % ranks:
        yield "linear_num_key_heads", (
            f"is not divisible by --tensor-model-parallel-size {ranks}: ranks share whole heads"
        )
    for name, value in _PLAIN.items():
        if config.value(name) != value:
            wanted = "leave it out" if value in (None, False) else f"use {value}"
            yield name, f"is not built with --linear-attention-freq; {wanted}"
    if config.kv_cache_is_rounded:
        yield "rl_kv_cache_dtype", "is not built with --linear-attention-freq; use auto"
    yield from _pattern_problems(config)


def _pattern_problems(config: RLConfig) -> Iterator[Finding]:
    layers, stages = config.model.num_layers, config.stages
    if layers is None:
        return
    try:
        has_state = linear_layers(config.delta.linear_attention_freq, layers)
    except ValueError as error:
        yield "linear_attention_freq", f"{error}; use a number such as 4, or a list with a 0 or 1 for each layer"
        return
    if not any(has_state):
        yield "linear_attention_freq", "gives no layer a state; leave it out"
    if not stages.sizes(layers):
        return
    for stage in range(stages.count):
        if all(has_state[layer] for chunk in stages.layers_of(stage, layers) for layer in chunk):
            where = f"pipeline stage {stage} has" if stages.count > 1 else "the model has"
            yield "linear_attention_freq", f": {where} no layer with attention, which is not built; give it one"
            return
