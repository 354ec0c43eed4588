"""Qwen3 with routed experts, without shared ones."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_qwen, read_softmax_experts
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    return read_qwen(config, qk_layernorm=True, **read_softmax_experts(config))


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILY = Family(
    name="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    title="Qwen3 with experts",
    read=_read,
    examples=(
        {**SMALL, **_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
        {**SMALL, **_EXPERTS, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True,
         "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
)
