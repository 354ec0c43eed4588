"""The smallest configuration and model that exercise the real code."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig

VOCABULARY = 32

FLAGS = {
    "num-layers": 2,
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 4,
    "group-query-attention": None,
    "num-query-groups": 2,
    "swiglu": None,
    "disable-bias-linear": None,
    "add-qkv-bias": None,
    "untie-embeddings-and-output-weights": None,
    "normalization": "RMSNorm",
    "seq-length": 48,
    "make-vocab-size-divisible-by": 8,
    "init-method-std": 0.2,
    "embedding-init-method-std": 0.5,
    "tokenizer-model": "unused",
    "langrl-env-config": "unused",
    "run-dir": "unused",
    "perform-rl-step": None,
    "grpo-group-size": 4,
    "grpo-prompts-per-step": 4,
    "train-iters": 4,
    "lr": 1e-2,
    "micro-batch-size": 4,
}

WINDOWS = {
    "window_size": 6, "window_attn_skip_freq": 2, "rotary_base_local": 100, "rotary_seq_len_interpolation_factor": 2,
    "softmax_scale": 0.4, "swiglu": False, "geglu": True, "apply_layernorm_1p": True, "sandwich_norm": True,
    "scale_embedding": True, "qk_layernorm": True, "add_qkv_bias": False, "untie_embeddings_and_output_weights": False,
}  # fmt: skip
"""Changes to `FLAGS`: layers of two kinds, with all that Gemma's have beyond Llama's."""

SINKS = {
    "window_size": 6, "window_attn_skip_freq": 2, "softmax_type": "learnable", "swiglu": False, "quick_geglu": True,
    "activation_func_clamp_value": 0.5, "glu_linear_offset": 1, "disable_bias_linear": False, "num_experts": 4,
    "moe_ffn_hidden_size": 24,
}  # fmt: skip
"""Changes to `FLAGS`: windows in every other layer, sinks, experts, biases everywhere, bounded gates, as in gpt-oss."""
POST_NORMS = {
    "post_norm": True, "qk_layernorm": True, "qk_layernorm_across_heads": True, "add_qkv_bias": False, "window_size": 6,
    "window_attn_skip_freq": 2, "rotary_base_local": 100, "rope_type": "yarn", "rotary_scaling_factor": 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""Changes to `FLAGS`: what OLMo 3 has beyond Llama, YaRN among it."""
MIXED = {
    "num_layers": 3, "moe_layer_freq": "([0]*1+[1]*2)", "num_experts": 8, "moe_ffn_hidden_size": 24,
    "moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
    "moe_shared_expert_intermediate_size": 40, "rotary_percent": 0.5, "qk_layernorm": True,
}  # fmt: skip
"""Changes to `FLAGS`: a dense layer, then experts, all that GLM-4.5's have beyond Qwen3's."""
LATENT = {
    "num_layers": 3, "group_query_attention": False, "num_query_groups": False, "add_qkv_bias": False,
    "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8, "kv_channels": 16, "softmax_scale": 0.4, "rope_type": "yarn", "rotary_scaling_factor": 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""Changes to `FLAGS`: latent attention, whose scale and rotation are YaRN's."""
LATENT_EXPERTS = LATENT | {
    name: value for name, value in MIXED.items() if name.startswith(("moe_", "num_experts"))
}
"""Changes to `FLAGS`: all that DeepSeek-V3 has."""
DELTA = {
    "num_layers": 3, "linear_attention_freq": 3, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "attention_output_gate": True,
    "qk_layernorm": True, "apply_layernorm_1p": True, "rotary_percent": 0.5, "add_qkv_bias": False,
}  # fmt: skip
"""Changes to `FLAGS`: two layers with a recurrent state, then gated attention, as in Qwen3.5."""
DELTA_EXPERTS = DELTA | {
    "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True, "linear_joint_projections": True,
}  # fmt: skip
"""Changes to `FLAGS`: all that Qwen3-Next has."""

SHAPES = {
    "grouped, gated, untied": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "one group": {"num_query_groups": 1, "disable_bias_linear": False, "qk_layernorm": True},
    "as many groups as heads": {"group_query_attention": False, "num_query_groups": False},
    "all biases": {"disable_bias_linear": False},
    "no bias": {"add_qkv_bias": False},
    "qk norms": {"qk_layernorm": True, "num_layers": 3},
    "gelu": {"swiglu": False, "ffn_hidden_size": 40},
    "layer norms": {"normalization": "LayerNorm", "qk_layernorm": True},
    "wide heads": {"kv_channels": 12},
    "windows": WINDOWS,
    "sinks": SINKS,
    "post norms": POST_NORMS,
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 24, "qk_layernorm": True},
    "mixed": {**MIXED, "moe_shared_expert_gate": True},
    "latent": LATENT | {"q_lora_rank": False, "softmax_scale": False},
    "latent, experts": LATENT_EXPERTS,
    "delta": DELTA | {"untie_embeddings_and_output_weights": False},
    "delta, experts": DELTA_EXPERTS,
    "odd widths": {"hidden_size": 40, "ffn_hidden_size": 52, "make_vocab_size_divisible_by": 24},
}
"""Changes to `FLAGS` that between them have every part a model may have."""


def tiny_config(world_size: int = 1, **changes: object) -> RLConfig:
    """`FLAGS` with changes: ``tiny_config(add_qkv_bias=False, seq_length=64)``; False removes a flag."""
    flags = dict(FLAGS)
    for name, value in changes.items():
        spelling = name.replace("_", "-")
        flags.pop(spelling, None)
        if value is not False:
            flags[spelling] = None if value is True else value
    argv: list[str] = []
    for name, value in flags.items():
        texts = () if value is None else value if isinstance(value, tuple | list) else (value,)
        argv += [f"--{name}", *map(str, texts)]
    config, problems = read_config(argv, world_size)
    assert not problems, problems
    return config


def tiny_policy(config: RLConfig | None = None, seed: int = 1):
    """A `PolicyModel` with random weights; the process groups must be initialised."""
    from megatron_rl.models.gpt import build_model
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.groups import seed_everything

    seed_everything(seed)
    return build_model(config or tiny_config(), current_platform(), VOCABULARY)


def write_tokenizer(directory: Path) -> Path:
    """The quickstart's tokenizer, made by the quickstart's own script."""
    import runpy

    script = Path(__file__).parents[2] / "examples" / "quickstart" / "make_tokenizer.py"
    runpy.run_path(str(script))["main"](directory)
    return directory


def single_thread() -> None:
    """Tests compare numbers and share two cores: one thread each."""
    torch.set_num_threads(1)
