"""``config.json`` as published: older spellings than transformers writes today, and the models' known sizes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.arguments import read_config
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families import HfModel, read_model
from megatron_rl.families.family import FAMILIES
from megatron_rl.tensor_files import stored_tensors
from tests.support.deepseek import DEEPSEEK

QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "max_window_layers": 64, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "hidden_act": "silu", "max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
SCALING = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "num_attention_heads": 4,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "vocab_size": 262144,
}  # fmt: skip

GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_key_value_heads": 8, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 1000000, "vocab_size": 151552, "tie_word_embeddings": False,
}  # fmt: skip
_OLMO = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 500000, "tie_word_embeddings": False,
}  # fmt: skip

PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Qwen2.5-32B": (
        {**QWEN2_5, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 152064, "max_position_embeddings": 131072},
        32_763_876_352,
        {"kv_channels": 128, "add_qkv_bias": True, "norm_epsilon": 1e-5, "rotary_base": 1_000_000}),
    "Qwen2.5-7B": (
        {**QWEN2_5, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 152064, "max_position_embeddings": 131072},
        7_615_616_512,
        {"kv_channels": 128, "norm_epsilon": 1e-6}),
    "Qwen2.5-0.5B": (
        {**QWEN2_5, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24,
         "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 151936, "max_position_embeddings": 32768,
         "tie_word_embeddings": True},
        494_032_768,
        {"kv_channels": 64, "untie_embeddings_and_output_weights": False}),
    "Qwen3-0.6B": (
        {**QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
         "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
         "tie_word_embeddings": True},
        596_049_920,
        {"kv_channels": 128, "qk_layernorm": True, "add_qkv_bias": False}),
    "Qwen1.5-MoE-A2.7B": (
        {**QWEN2_5, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048,
         "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16,
         "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60,
         "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-6, "vocab_size": 151936},
        14_315_784_192,
        {"moe_shared_expert_gate": True, "moe_router_pre_softmax": True, "moe_layer_freq": "1"}),
    "GLM-4.5-Air": (
        {**GLM4_MOE, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "n_routed_experts": 128,
         "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False},
        106_852_251_264,
        {"rotary_percent": 0.5, "moe_layer_freq": "([0]*1+[1]*45)", "add_qkv_bias": True,
         "moe_shared_expert_intermediate_size": 1408}),
    "Qwen3-30B-A3B": (
        {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
         "intermediate_size": 6144, "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
         "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
         "tie_word_embeddings": False},
        30_532_122_624,
        {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_router_pre_softmax": False}),
    "Llama-3.1-8B": (
        {**LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "tie_word_embeddings": False, "rope_scaling": {**SCALING, "factor": 8.0}},
        8_030_261_248,
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "kv_channels": 128}),
    "Llama-3.2-1B": (
        {**LLAMA3, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_hidden_layers": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
         "rope_scaling": {**SCALING, "factor": 32.0}},
        1_235_814_400,
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "untie_embeddings_and_output_weights": False}),
    "Mistral-7B-v0.1": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
        7_241_732_096,
        {"window_size": 4096, "window_attn_skip_freq": None, "kv_channels": 128}),
    "OLMo-2-7B": (
        {**_OLMO, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "max_position_embeddings": 4096,
         "rope_scaling": None, "vocab_size": 100352},
        7_298_617_344,
        {"post_norm": True, "qk_layernorm_across_heads": True, "rotary_base": 500_000}),
    "OLMo-3-7B": (
        {**_OLMO, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 65536,
         "sliding_window": 4096, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
         "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                          "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "vocab_size": 100278},
        7_298_011_136,
        {"window_size": 4096, "window_attn_skip_freq": 4, "rope_type": "yarn", "rotary_scaling_factor": 8.0,
         "rotary_base": 500_000, "rotary_base_local": 500_000}),
    "Gemma-3-270M": (
        {**GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
         "max_position_embeddings": 32768, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3},
        268_098_176,
        {"kv_channels": 256, "window_size": 512, "window_attn_skip_freq": 6, "softmax_scale": 0.0625, "geglu": True,
         "rotary_base": 1_000_000, "rotary_base_local": 10_000, "rotary_seq_len_interpolation_factor": None}),
    "Gemma-3-1B": (  # layers are not listed: every sixth has no window
        {**GEMMA3, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
         "sliding_window_pattern": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        999_885_952,
        {"window_attn_skip_freq": 6, "rotary_seq_len_interpolation_factor": 8.0,
         "untie_embeddings_and_output_weights": False}),
    "gpt-oss-20b": (
        {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
         "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
         "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
         "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
         "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
         "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
         "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
         "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
         "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
         "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
         "vocab_size": 201088},
        20_914_757_184,
        {"rope_type": "yarn", "rotary_base": 150_000, "rotary_scaling_factor": 32.0, "mscale": 1.0,
         "correction_range_round_to_int": False, "window_size": 128, "window_attn_skip_freq": 2,
         "activation_func_clamp_value": 7.0, "softmax_type": "learnable", "add_bias_linear": True}),
}  # fmt: skip
PUBLISHED |= DEEPSEEK


def _read(folder: Path, config: dict[str, Any]) -> HfModel:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters(tmp_path: Path, name: str) -> None:
    config, parameters, settings = PUBLISHED[name]
    model = _read(tmp_path, config)
    assert sum(torch.Size(shape).numel() for shape in model.weights.tensors.values()) == parameters
    found = model.architecture.settings()
    assert {key: found[key] for key in settings} == settings


def test_the_command_of_the_32b_run_agrees_with_the_published_config(tmp_path: Path) -> None:
    _read(tmp_path, PUBLISHED["Qwen2.5-32B"][0])
    flags = (
        "--num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --num-attention-heads 40 --num-query-groups 8 "
        "--group-query-attention --swiglu --disable-bias-linear --add-qkv-bias --normalization RMSNorm "
        "--norm-epsilon 1e-5 --rotary-base 1000000 --untie-embeddings-and-output-weights --position-embedding-type rope"
    )
    _, problems = read_config([*shlex.split(flags), "--hf-config", str(tmp_path)], 8)
    assert [line for line in map(str, problems) if "contradicts" in line] == []
    _, problems = read_config(["--norm-epsilon", "1e-6", "--no-swiglu", "--hf-config", str(tmp_path)], 8)
    contradictions = [line for line in map(str, problems) if "contradicts" in line]
    assert [line.split(" contradicts")[0] for line in contradictions] == ["--norm-epsilon 1e-06", "--no-swiglu"]


SCALED = {**SCALING, "factor": 8.0}


@pytest.mark.parametrize(
    ("parameters", "scaling", "refused"),
    [
        ({**SCALED, "rope_theta": 500000.0}, SCALED, None),
        ({**SCALED, "rope_theta": 500000.0}, {}, None),
        ({}, SCALED, None),
        ({**SCALED, "rope_theta": 500000.0}, {"type": "dynamic", "factor": 2.0}, 'rope_scaling.rope_type "dynamic"'),
        ({"rope_type": "default", "rope_theta": 500000.0}, SCALED, "rope_parameters says otherwise; keep one of them"),
        ({**SCALED, "factor": 32.0}, SCALED, "rope_parameters says otherwise"),
        (SCALED, {**SCALED, "rope_theta": 10000.0}, "rope_parameters says otherwise"),
        (SCALED, {"type": "default"}, "rope_parameters says otherwise"),
        (SCALED, "llama3", "rope_scaling must be a mapping"),
    ],
)
def test_rope_scaling_beside_rope_parameters_says_the_same_or_is_refused(
    tmp_path: Path, parameters: dict, scaling: Any, refused: str | None
) -> None:
    values = {**PUBLISHED["Llama-3.1-8B"][0], "rope_parameters": parameters, "rope_scaling": scaling}
    if refused is None:
        assert _read(tmp_path, values).architecture.rope_scaling_factor == 8.0
        return
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, values)
    assert any(refused in line and "config.json" in line for line in caught.value.lines)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"rope_scaling": {**SCALING, "factor": 8.0, "low_freq_factor": 2.0}}, ["rope_scaling.low_freq_factor 2.0"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ['rope_scaling.rope_type "dynamic"']),
        ({"rope_scaling": {**SCALING, "factor": None}}, ["lacks rope_scaling.factor"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling must be a mapping"]),
        ({"rope_parameters": {"full_attention": {"type": "yarn"}}, "rope_scaling": None}, ["rope_parameters.full_att"]),
        ({"rope_theta": 10000.5}, ["rope_theta must be a whole number", "10000.5"]),
        ({"rope_theta": float("inf")}, ["rope_theta must be a whole number", "inf"]),
        ({"rope_scaling": {**SCALING, "factor": float("inf")}}, ["rope_scaling.factor must be a number", "inf"]),
        ({"rms_norm_eps": float("inf")}, ["rms_norm_eps must be a number", "inf"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps must be a number", "..."]),
        ({"rope_scaling": 100 * ["x" * 1000]}, ["rope_scaling must be a mapping", "..."]),
        ({"hidden_size": 10**400}, ["hidden_size must be a whole number above 0", "..."]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers 1000000000", "at most 1000 layers"]),
        ({"layer_types": 32}, ["layer_types must be a list of names, got 32"]),
        ({"layer_types": [["full_attention"]]}, ["layer_types must be a list of names"]),
        ({"layer_types": ["full_attention"] * 31}, ["layer_types names 31 layers", "num_hidden_layers is 32"]),
        ({"layer_types": ["full_attention"] * 31 + ["chunked"]}, ['layer_types "chunked" is not built']),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"attention_bias": True}, ["attention_bias true", "output projection"]),
        ({"mlp_bias": True}, ["mlp_bias true"]),
        ({"hidden_act": "gelu"}, ['hidden_act "gelu"']),
        ({"attention_dropout": 0.1}, ["attention_dropout 0.1"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings must be true or false", "'yes'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers must be a whole number", "True"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification is not known"]),
    ],
)
def test_what_is_not_built_is_named_with_its_value(tmp_path: Path, changes: dict, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, {**PUBLISHED["Llama-3.1-8B"][0], **changes})
    (line,) = caught.value.lines
    assert [text for text in (*fragments, "config.json") if text not in line] == []


def test_a_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 20_000 + "1" + "}" * 20_000)
    with pytest.raises(ConfigError, match=r"config.json is not JSON \(it is nested too deeply\)"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("model.safetensors", "recursion limit exceeded"), ("model.safetensors.index.json", "it is nested too deeply")],
)
def test_tensors_whose_description_is_nested_too_deeply(tmp_path: Path, name: str, fault: str) -> None:
    text = ('{"weight_map":' + "[" * 20_000 + "]" * 20_000 + "}").encode()
    (tmp_path / name).write_bytes((b"" if name.endswith("json") else len(text).to_bytes(8, "little")) + text)
    with pytest.raises(CheckpointError, match=fault):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]},
    ],
)
def test_headers_that_make_no_sense(tmp_path: Path, entry: dict[str, Any]) -> None:
    text = json.dumps({"model.norm.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match="model.safetensors is not a whole safetensors file"):
        stored_tensors(tmp_path)


def test_a_file_name_that_no_file_system_has(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 300 * "x"}}))
    with pytest.raises(CheckpointError, match=r"names 'x+...x+', which is no safetensors file beside it"):
        stored_tensors(tmp_path)


def test_several_of_them_come_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, {**PUBLISHED["Llama-3.1-8B"][0], "mlp_bias": True, "hidden_act": "gelu"})
    assert len(caught.value.lines) == 2


def test_more_experts_than_could_be_listed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_experts 1000000000 is not built here: at most 100,000 in all layers"):
        _read(tmp_path, {**PUBLISHED["Qwen3-30B-A3B"][0], "num_experts": 10**9})


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [*range(48)]}, {"mlp_only_layers": 3}, {"num_experts": None}])
def test_experts_that_are_in_no_layer_are_refused(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        _read(tmp_path, {**PUBLISHED["Qwen3-30B-A3B"][0], **changes})


def test_the_model_type_decides_where_no_class_is_named(tmp_path: Path) -> None:
    config = {key: value for key, value in PUBLISHED["Qwen3-0.6B"][0].items() if key != "architectures"}
    assert _read(tmp_path, config).family.name == "qwen3"


def test_a_misspelt_family_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean qwen3.*llama, .*qwen2"):
        FAMILIES.get("qwen3s")
    assert {"llama", "qwen2", "qwen3", "qwen3_moe"} <= set(FAMILIES.names())
