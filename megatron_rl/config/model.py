"""The shape of the transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag
from megatron_rl.families.architecture import MOST_LAYERS


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture, in Megatron's words."""

    hf_config: str | None = flag(None, path=True)
    """Directory with a Hugging Face config.json: the model's shape, instead of the flags below. See --load-hf."""
    num_layers: int | None = flag(None, ge=1, le=MOST_LAYERS, common=True)
    """Number of transformer layers."""
    hidden_size: int | None = flag(None, ge=1, le=1_000_000, common=True)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = flag(None, ge=1, le=10_000_000)
    """Width of the MLP. Without it 4 x hidden-size, or with --swiglu 8/3 x hidden-size in steps of 64."""
    num_attention_heads: int | None = flag(None, ge=1, le=65_536, common=True)
    """Number of query heads."""
    group_query_attention: bool = flag(False)
    """Share key and value heads among query heads; --num-query-groups says how many there are."""
    num_query_groups: int | None = flag(None, ge=1, le=65_536)
    """Key and value heads. Without it 1 under --group-query-attention, else --num-attention-heads."""
    kv_channels: int | None = flag(None, ge=1, le=65_536)
    """Width of one head. Without it hidden-size / num-attention-heads."""
    max_position_embeddings: int | None = flag(None, ge=1)
    """Longest sequence the model may see. Without it --seq-length."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = flag("rope")
    """How positions are encoded; only rope is built (Megatron's default: learned_absolute)."""
    use_rotary_position_embeddings: bool = flag(
        False, note="rotary positions are the default; --position-embedding-type is the flag that decides"
    )
    """Megatron's older spelling of --position-embedding-type rope."""
    rotary_base: int = flag(10000, ge=1, le=10**12)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, gt=0, le=1)
    """Share of each head that is rotated."""
    use_rope_scaling: bool = flag(False)
    """Scale low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = flag(8.0, ge=1, le=10_000)
    """By how much, with --use-rope-scaling: 8 in Llama 3.1, 32 in Llama 3.2."""
    normalization: Literal["RMSNorm", "LayerNorm"] = flag("RMSNorm")
    """Normalisation layer (Megatron's default: LayerNorm)."""
    norm_epsilon: float = flag(1e-5, gt=0, le=1)
    """Added to the variance in the normalisation."""
    swiglu: bool = flag(False)
    """Gated SiLU in the MLP instead of GELU."""
    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    """Biases of linear layers."""
    add_qkv_bias: bool = flag(False)
    """Give the query, key and value projection a bias, also under --disable-bias-linear."""
    qk_layernorm: bool = flag(False)
    """Normalise queries and keys per head."""
    num_experts: int | None = flag(None, ge=2, le=2048)
    """Routed experts in place of the MLP of every layer; without it layers are dense."""
    moe_ffn_hidden_size: int | None = flag(None, ge=1, le=10_000_000)
    """Width of one expert. Without it --ffn-hidden-size."""
    moe_router_topk: int = flag(2, ge=1)
    """Experts that each token is sent to."""
    moe_router_pre_softmax: bool = flag(False)
    """Weight experts by their share among all of them, not among those chosen."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "sinkhorn"] = flag("none")
    """Loss that keeps experts equally busy; only none is built (Megatron's default: aux_loss)."""
    untie_embeddings_and_output_weights: bool = flag(False)
    """Give the output head its own weight instead of the embedding's."""
    init_method_std: float = flag(0.02, gt=0, le=100)
    """Standard deviation of freshly initialised weights."""
    embedding_init_method_std: float | None = flag(None, gt=0, le=100)
    """The same for the embedding. Without it --init-method-std."""
    attention_dropout: float = flag(0.0, ge=0, lt=1)
    """Dropout of attention weights; must be 0 (Megatron's default: 0.1)."""
    hidden_dropout: float = flag(0.0, ge=0, lt=1)
    """Dropout of hidden states; must be 0 in RL (Megatron's default: 0.1)."""

    @property
    def is_complete(self) -> bool:
        """Every width and count is known, typed or derived."""
        return None not in (
            self.num_layers, self.hidden_size, self.ffn_hidden_size, self.num_attention_heads, self.num_query_groups,
            self.kv_channels,
        )  # fmt: skip
