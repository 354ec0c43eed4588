"""Parts of a model's shape; each is a section of the configuration, too, and each field a flag (`config.flags`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

SIZES_OF_LATENTS = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def flag(default: Any, **declared: Any) -> Any:
    """Make a field with the bounds of its flag."""
    return dataclasses.field(default=default, metadata=declared)


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Layer options of some model families (Gemma 3, Mistral, ...); --load-hf sets them from config.json."""

    window_size: int | None = flag(None, ge=1)
    """Sliding-window attention: a token attends to this many tokens including itself, e.g. 512."""
    window_attn_skip_freq: int | None = flag(None, ge=2)
    """Every this many layers, one layer uses full attention despite --window-size, e.g. 6."""
    softmax_scale: float | None = flag(None, gt=0, le=100)
    """Scale of the attention scores, e.g. 0.0625. Default: 1 / sqrt(kv-channels)."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable: each head has an attention sink, a learned logit in its softmax that attends to nothing (gpt-oss)."""
    rotary_base_local: int | None = flag(None, ge=1, le=10**12)
    """RoPE base frequency of sliding-window layers, e.g. 10000. Default: --rotary-base."""
    geglu: bool = False
    """Use gated GELU (tanh approximation) in the MLP."""
    quick_geglu: bool = False
    """Use gated quick GELU, x * sigmoid(1.702 x), in the MLP (gpt-oss)."""
    activation_func_clamp_value: float | None = flag(None, gt=0, le=10_000)
    """Clamp the experts' gate from above and their up projection on both sides to this value, e.g. 7 (gpt-oss)."""
    glu_linear_offset: float = flag(0.0, ge=0, le=10)
    """Added to the experts' up projection before it is multiplied by the gate, e.g. 1 (gpt-oss)."""
    apply_layernorm_1p: bool = False
    """Normalization weights are stored minus 1 (Gemma)."""
    sandwich_norm: bool = False
    """Also normalize the outputs of attention and MLP before the residual addition (Gemma)."""
    post_norm: bool = False
    """Normalize the outputs of attention and MLP and not their inputs (OLMo 2)."""
    qk_layernorm_across_heads: bool = False
    """With --qk-layernorm: normalize queries, and keys, over all heads together (OLMo 2)."""
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(hidden-size) (Gemma)."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Latent attention (DeepSeek-V3, Moonlight, Kimi-K2); --load-hf sets it from config.json."""

    multi_latent_attention: bool = False
    """Use multi-head latent attention, with the sizes below."""
    q_lora_rank: int | None = flag(None, ge=1, le=1_000_000)
    """Width of the latent that queries are expanded from, e.g. 1536. Default: queries have no latent."""
    kv_lora_rank: int | None = flag(None, ge=1, le=1_000_000)
    """Width of the latent that keys and values are expanded from, e.g. 512."""
    qk_head_dim: int | None = flag(None, ge=1, le=65_536)
    """Width of the part of a query or key head that is not rotated, e.g. 128."""
    qk_pos_emb_head_dim: int | None = flag(None, ge=2, le=65_536)
    """Width of the part that RoPE rotates, in neighbouring pairs, e.g. 64. All key heads share it."""
    v_head_dim: int | None = flag(None, ge=1, le=65_536)
    """Width of a value head, e.g. 128."""
    rl_mla_absorb: bool = flag(True, off="--no-rl-mla-absorb")
    """Absorbed attention in rollouts, with a KV cache of latents. Without it the cache holds all heads and takes many
    times the memory."""

    @property
    def is_complete(self) -> bool:
        """The sizes are known, where there is latent attention."""
        return not self.multi_latent_attention or None not in (getattr(self, name) for name in SIZES_OF_LATENTS)


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5); --load-hf sets it from config.json."""

    linear_attention_freq: str | None = None
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
    linear_joint_projections: bool = False
    """The published model joins the delta rule's query, key, value and gate into one matrix, and its strength and decay
    into another (Qwen3-Next); LoRA adapts these."""
    attention_output_gate: bool = False
    """Multiply the output of attention by a sigmoid of the layer's input."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Mixture-of-experts options of some families; --load-hf sets them from config.json."""

    moe_layer_freq: str = "1"
    """Which layers have experts: N for every Nth layer from the first on, or a list with 0 for dense layers, e.g.
    ([0]*1+[1]*26)."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Score function of the router. sigmoid normalizes the scores of the chosen experts by their sum."""
    moe_router_enable_expert_bias: bool = False
    """Add a bias per expert to the scores for the choice of experts only (DeepSeek-V3). It is not trained."""
    moe_router_topk_scaling_factor: float | None = flag(None, gt=0, le=1000)
    """Factor of the chosen experts' weights, e.g. 2.5."""
    moe_router_num_groups: int | None = flag(None, ge=2, le=2048)
    """Group-limited routing: number of groups of experts, e.g. 8."""
    moe_router_group_topk: int | None = flag(None, ge=1, le=2048)
    """Group-limited routing: groups that a token's experts are chosen from, e.g. 4. A group counts as its best two."""
    moe_shared_expert_intermediate_size: int | None = flag(None, ge=1, le=10_000_000)
    """Width of the shared experts together, through which every token goes, e.g. 1408. Default: none."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared experts' output by a sigmoid gate (Qwen2-MoE)."""


@dataclass(frozen=True, kw_only=True)
class RotationOptions:
    """RoPE scaling for long contexts; --load-hf sets it from config.json."""

    rotary_seq_len_interpolation_factor: float | None = flag(None, ge=1, le=10_000)
    """Divide positions by this factor before RoPE, e.g. 8. Sliding-window layers with --rotary-base-local are not
    scaled."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """yarn: scale RoPE as YaRN does (arXiv:2309.00071), by the flags below. Sliding-window layers with
    --rotary-base-local are not scaled."""
    rotary_scaling_factor: float = flag(1.0, ge=1, le=10_000)
    """YaRN: context length relative to the original one, e.g. 4."""
    original_max_position_embeddings: int = flag(4096, ge=1, le=10**9)
    """YaRN: context length before scaling, e.g. 32768."""
    beta_fast: float = flag(32.0, gt=0, le=1e6)
    """YaRN: frequencies with more rotations than this in the original context are not scaled."""
    beta_slow: float = flag(1.0, gt=0, le=1e6)
    """YaRN: frequencies with fewer rotations than this are divided by the factor."""
    mscale: float = flag(1.0, ge=-1000, le=1000)
    """YaRN: multiply cos and sin by 1 + 0.1 x mscale x ln(factor)."""
    mscale_all_dim: float = flag(0.0, ge=0, le=1000)
    """YaRN: divide cos and sin by 1 + 0.1 x mscale-all-dim x ln(factor)."""
    correction_range_round_to_int: bool = flag(True, off="--no-correction-range-round-to-int")
    """Rounding of YaRN's bounds between scaled and unscaled frequencies to integers (truncate in config.json)."""
