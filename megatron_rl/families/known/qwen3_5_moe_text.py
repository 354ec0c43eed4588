"""Qwen3.5 with experts, text only: the layers of `qwen3_5_text`, and the experts of Qwen3-Next."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL_DELTA, Family, read_gated_delta, read_qwen, shared_expert_weights
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    width = config.whole("moe_intermediate_size")
    count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    return read_qwen(
        config,
        num_experts=config.whole(count),
        ffn_hidden_size=width,
        moe_ffn_hidden_size=width,
        moe_router_topk=config.whole("num_experts_per_tok"),
        moe_shared_expert_intermediate_size=config.whole("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
        **read_gated_delta(config),
    )


_SMALL = {name: value for name, value in SMALL_DELTA.items() if name != "intermediate_size"} | {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip

FAMILY = Family(
    name="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    title="Qwen3.5 with experts, text only",
    read=_read,
    weights=shared_expert_weights,
    passed_through=("mtp.",),
    examples=(_SMALL,),
)
