"""DeepSeek-V3, Moonlight, Kimi-K2: latent attention, sigmoid routing with a bias, shared experts, dense layers."""

from __future__ import annotations

import math
from typing import Any

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder, read_sigmoid_experts
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.rotation import read_rotation


def _read(config: HfConfig) -> Architecture:
    heads = config.whole("num_attention_heads")
    config.expect("num_key_value_heads", heads, why="heads share a latent, not keys")
    config.expect("rope_interleave", True, why="neighbouring numbers are rotated as a pair")
    plain, rotated = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim")
    if rotated % 2:
        config.refuse("qk_rope_head_dim", rotated, "numbers are rotated in pairs")
    rotation = read_rotation(config)
    return read_decoder(
        config,
        rotation=rotation,
        num_query_groups=heads,
        kv_channels=plain + rotated,
        multi_latent_attention=True,
        q_lora_rank=config.whole("q_lora_rank") if config.get("q_lora_rank") is not None else None,
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_head_dim=plain,
        qk_pos_emb_head_dim=rotated,
        v_head_dim=config.whole("v_head_dim"),
        softmax_scale=_scale(config, plain + rotated, rotation),
        **read_sigmoid_experts(config),
    )


def _scale(config: HfConfig, width: int, rotation: dict[str, Any]) -> float | None:
    """Return the softmax scale: YaRN multiplies scores by an additional factor; None: 1 / sqrt(width)."""
    rope = config.within("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if rotation.get("rope_type") != "yarn" or not rope.get("mscale_all_dim"):
        return None
    gain = 0.1 * rope.number("mscale_all_dim") * math.log(rotation["rotary_scaling_factor"]) + 1.0
    return gain * gain / math.sqrt(width)


_SMALL = {
    **SMALL, "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446,
    "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}  # fmt: skip
"""Like Moonlight."""
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 256,
}  # fmt: skip

FAMILY = Family(
    name="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    title="DeepSeek-V3, Moonlight, Kimi-K2",
    read=_read,
    later_layers=("num_nextn_predict_layers", "num_mtp_layers"),
    examples=(
        _SMALL,
        {
            **_SMALL, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 24, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_parameters": _YARN,
        },
    ),
)  # fmt: skip
