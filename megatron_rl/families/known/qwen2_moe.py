"""Qwen1.5 and Qwen2 with experts: biases on queries, keys and values, and a shared expert behind a sigmoid gate."""

from __future__ import annotations

from megatron_rl.families.architecture import MOST_LAYERS, Architecture, layer_pattern
from megatron_rl.families.family import SMALL, Family, read_qwen
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.weights import WeightMap, decoder_weights


def _read(config: HfConfig) -> Architecture:
    config.expect("qkv_bias", True, why="queries, keys and values have biases")
    # transformers 5 writes the number of experts under another name than the published files have.
    count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    return read_qwen(
        config,
        add_qkv_bias=True,
        num_experts=config.whole(count),
        moe_ffn_hidden_size=config.whole("moe_intermediate_size"),
        moe_router_topk=config.whole("num_experts_per_tok"),
        # Shares of the chosen experts among themselves are those of a softmax over the chosen ones.
        moe_router_pre_softmax=not config.switch("norm_topk_prob", False),
        moe_layer_freq=_layers(config),
        moe_shared_expert_intermediate_size=config.whole("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


def _layers(config: HfConfig) -> str:
    """Every so many layers one has experts, but those that are listed as dense."""
    step, layers = config.whole("decoder_sparse_step", 1), min(config.whole("num_hidden_layers"), MOST_LAYERS)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or step > layers or len(dense) >= layers:
        config.refuse("mlp_only_layers", dense, "some layers have experts, and the dense ones are listed")
        return "1"
    return layer_pattern([index not in dense and (index + 1) % step == 0 for index in range(layers)])


def _weights(model: Architecture) -> WeightMap:
    return decoder_weights(model, {"shared_experts": "shared_expert"})


_SMALL = {
    **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip

FAMILY = Family(
    name="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    title="Qwen1.5 and Qwen2 with experts",
    read=_read,
    weights=_weights,
    examples=(
        {**_SMALL, "norm_topk_prob": False},
        {**_SMALL, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
)
