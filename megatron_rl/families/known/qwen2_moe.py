"""Qwen1.5 and Qwen2 with experts: biases on queries, keys and values, and a shared expert with a sigmoid gate."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_qwen, read_softmax_experts, shared_expert_weights
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    config.expect("qkv_bias", True, why="queries, keys and values have biases")
    return read_qwen(
        config,
        add_qkv_bias=True,
        **read_softmax_experts(config),
        moe_shared_expert_intermediate_size=config.whole("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


_SMALL = {
    **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip

FAMILY = Family(
    name="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    title="Qwen1.5 and Qwen2 with experts",
    read=_read,
    weights=shared_expert_weights,
    examples=(
        {**_SMALL, "norm_topk_prob": False},
        {**_SMALL, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
)
