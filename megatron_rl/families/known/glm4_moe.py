"""GLM-4.5 and 4.6: sigmoid routing with a bias, shared experts, dense layers first, half of each head rotated."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder, read_sigmoid_experts
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    return read_decoder(
        config,
        add_qkv_bias=config.switch("attention_bias", False),
        qk_layernorm=config.switch("use_qk_norm", False),
        rotary_percent=config.rotated_share(0.5),
        **read_sigmoid_experts(config),
    )


_SMALL = {
    **SMALL, "head_dim": 16, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
_GROUPED = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}

FAMILY = Family(
    name="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    title="GLM-4.5 and 4.6",
    read=_read,
    later_layers=("num_nextn_predict_layers", "num_mtp_layers"),
    examples=(
        {**_SMALL, "use_qk_norm": True},
        {**_SMALL, **_GROUPED, "first_k_dense_replace": 2, "n_shared_experts": 2},
    ),
)
