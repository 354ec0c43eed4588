"""``config.json`` of published models with latent attention, their parameters, and what some settings become."""

from __future__ import annotations

from typing import Any

import pytest

_COMMON = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "initializer_range": 0.02, "kv_lora_rank": 512, "moe_layer_freq": 1, "n_group": 1, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128,
}  # fmt: skip
_YARN = {"type": "yarn", "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 4096}  # fmt: skip
DEEPSEEK: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Moonlight-16B-A3B": (
        {**_COMMON, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
         "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16,
         "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
         "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "vocab_size": 163840},
        15_960_110_208,
        {"multi_latent_attention": True, "q_lora_rank": None, "kv_channels": 192, "softmax_scale": None,
         "moe_shared_expert_intermediate_size": 2816, "moe_router_num_groups": None, "rotary_base": 50_000}),
    "DeepSeek-V3, in bf16": (
        {**_COMMON, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
         "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
         "n_routed_experts": 256, "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
         "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rope_theta": 10000, "routed_scaling_factor": 2.5,
         "rope_scaling": {**_YARN, "factor": 40.0, "beta_fast": 32.0}, "vocab_size": 129280},
        671_026_419_200,
        {"q_lora_rank": 1536, "softmax_scale": pytest.approx(0.1352337788608801), "rotary_scaling_factor": 40.0,
         "moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_layer_freq": "([0]*3+[1]*58)"}),
    "Kimi-K2, in bf16": (
        {**_COMMON, "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432,
         "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "n_routed_experts": 384,
         "num_attention_heads": 64, "num_hidden_layers": 61, "num_key_value_heads": 64, "q_lora_rank": 1536,
         "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "vocab_size": 163840,
         "rope_scaling": {**_YARN, "factor": 32.0}},
        1_026_408_232_448,
        {"moe_layer_freq": "([0]*1+[1]*60)", "rotary_scaling_factor": 32.0}),
}  # fmt: skip
