"""What a ``config.json`` says about a model, in the words of Megatron's flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

MOST_LAYERS = 1000
MOST_EXPERTS = 100_000
"""Of a model, in all its layers: each tensor is listed by name, so more would fill the memory before any check."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder with rotary positions, RMSNorm and a gated SiLU MLP. Fields are named like their flags."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """Rows of the embedding, without Megatron's padding."""
    max_position_embeddings: int
    rotary_base: int
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    norm_epsilon: float
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    num_experts: int | None = None
    """None: dense layers."""
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    untie_embeddings_and_output_weights: bool
    init_method_std: float
    normalization: str = "RMSNorm"
    swiglu: bool = True
    add_bias_linear: bool = False
    position_embedding_type: str = "rope"
    rotary_percent: float = 1.0

    def settings(self) -> dict[str, Any]:
        """Flag's name -> value."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
