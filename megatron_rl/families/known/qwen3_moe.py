"""Qwen3 with routed experts in every layer, none of them shared."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_qwen
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    config.expect("decoder_sparse_step", 1, why="every layer has experts")
    config.expect("mlp_only_layers", [], why="every layer has experts")
    # transformers 5 writes the number of experts under another name than the published files have.
    count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    return read_qwen(
        config,
        qk_layernorm=True,
        num_experts=config.whole(count),
        moe_ffn_hidden_size=config.whole("moe_intermediate_size"),
        moe_router_topk=config.whole("num_experts_per_tok"),
        # Shares of the chosen experts among themselves are those of a softmax over the chosen ones.
        moe_router_pre_softmax=not config.switch("norm_topk_prob", False),
    )


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILY = Family(
    name="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    title="Qwen3 with experts",
    read=_read,
    examples=(
        {**SMALL, **_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
        {**SMALL, **_EXPERTS, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
)
