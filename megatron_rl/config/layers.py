"""What layers of some model families have beyond Llama's; a model's config.json fills it in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.flags import Finding, flag, flags_of

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Windows, rotations, norms and activations of the layers, in Megatron's words where it has them."""

    window_size: int | None = flag(None, ge=1)
    """Sliding-window attention: each token attends to this many tokens, itself included, for example 512."""
    window_attn_skip_freq: int | None = flag(None, ge=2)
    """Every this many layers one attends to all tokens in spite of --window-size, for example 6."""
    softmax_scale: float | None = flag(None, gt=0, le=100)
    """Factor of the attention scores, for example 0.0625. Without it 1 / sqrt(--kv-channels)."""
    rotary_base_local: int | None = flag(None, ge=1, le=10**12)
    """Base of the rotary frequencies in layers with a window, for example 10000. Without it --rotary-base."""
    rotary_seq_len_interpolation_factor: float | None = flag(None, ge=1, le=10_000)
    """Divide positions by this factor before they are turned into rotary angles, for example 8. Layers with a window
    and --rotary-base-local keep theirs."""
    geglu: bool = flag(False)
    """Gated GELU (its tanh approximation) in the MLP."""
    apply_layernorm_1p: bool = flag(False)
    """Norms store their weight less 1."""
    sandwich_norm: bool = flag(False)
    """Normalise the outputs of attention and MLP, too, before they are added to the residual stream."""
    scale_embedding: bool = flag(False)
    """Multiply embeddings by sqrt(--hidden-size)."""


def layer_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Which of these need each other, and what cannot be combined with them."""
    layers, model = config.layers, config.model
    if layers.geglu and model.swiglu:
        yield "geglu", "and --swiglu are two activations of one MLP; keep one of them"
    for name in ("window_attn_skip_freq", "rotary_base_local"):
        if getattr(layers, name) is not None and layers.window_size is None:
            yield name, "has no layers to tell apart without --window-size; add it"
    used = [each.spelling for each in flags_of(LayerConfig) if getattr(layers, each.name) != each.default]
    if not used:
        return
    named = f"cannot be combined with {', '.join(used)}"
    if config.kernels.transformer_impl != "local":
        yield "transformer_impl", f"{named}: its fused layers compute Llama's; use --transformer-impl local"
    if config.rollout.rl_inference_engine != "rollout":
        yield "rl_inference_engine", f"{named}: megatron-core's engine computes Llama's layers; use rollout"
    if model.normalization != "RMSNorm":
        yield "normalization", f"{named}; use RMSNorm"
    if model.num_experts is not None:
        yield "num_experts", f"{named}: not built for experts"
    if model.add_bias_linear:
        yield "add_bias_linear", f"{named}: add --disable-bias-linear"
