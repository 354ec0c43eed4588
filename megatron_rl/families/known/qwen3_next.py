"""Qwen3-Next: three DeltaNet layers per gated attention layer, experts, and a gated shared expert."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import (
    SMALL_DELTA,
    Family,
    read_gated_delta,
    read_qwen,
    read_softmax_experts,
    shared_expert_weights,
)
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    return read_qwen(
        config,
        **read_softmax_experts(config, norm_topk_prob=True),
        moe_shared_expert_intermediate_size=config.whole("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
        linear_joint_projections=True,
        **read_gated_delta(config),
    )


_SMALL = {
    **SMALL_DELTA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip

FAMILY = Family(
    name="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    title="Qwen3-Next",
    read=_read,
    weights=shared_expert_weights,
    passed_through=("mtp.",),
    examples=(
        {**_SMALL, "norm_topk_prob": True},
        {
            **_SMALL, "linear_num_key_heads": 4, "linear_value_head_dim": 8, "norm_topk_prob": False,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True,
            "decoder_sparse_step": 2,
        },
    ),
)  # fmt: skip
