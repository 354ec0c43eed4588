"""Mistral, OLMo, DeepSeek and Qwen with experts: what their files may say, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.families import HfModel, read_model
from tests.unit.families.test_published_models import PUBLISHED


def _read(folder: Path, config: dict[str, Any]) -> HfModel:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder)


@pytest.mark.parametrize(
    ("name", "changes", "fragment"),
    [
        ("Mistral-7B-v0.1", {"layer_types": ["full_attention"] * 32}, "all layers of Mistral are alike"),
        ("Mistral-7B-v0.1", {"num_key_value_heads": None}, "lacks num_key_value_heads"),
        ("OLMo-2-7B", {"attention_bias": True}, "attention_bias true"),
        ("OLMo-3-7B", {"rope_theta": 10000}, "rope_theta 10000 is not built"),
        ("OLMo-3-7B", {"layer_types": ["full_attention"] + ["sliding_attention"] * 31}, "layer_types"),
        ("OLMo-3-7B", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "keep one of them"),
        ("Moonlight-16B-A3B", {"num_key_value_heads": 4}, "num_key_value_heads 4 is not built here"),
        ("Moonlight-16B-A3B", {"rope_interleave": False}, "rope_interleave false is not built here"),
        ("Moonlight-16B-A3B", {"scoring_func": "softmax"}, 'scoring_func "softmax" is not built here'),
        ("Moonlight-16B-A3B", {"attention_bias": True}, "attention_bias true is not built here"),
        ("Moonlight-16B-A3B", {"n_group": 8, "topk_group": 2}, "topk_group 2 is not built here"),
        ("Moonlight-16B-A3B", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ("DeepSeek-V3, in bf16", {"quantization_config": {"quant_method": "fp8"}}, "take the unquantised model"),
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, "use_sliding_window true"),
        ("Qwen1.5-MoE-A2.7B", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
    ],
)
def test_other_layers_are_refused_by_name(tmp_path: Path, name: str, changes: dict, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, {**PUBLISHED[name][0], **changes})
    assert fragment in str(caught.value)


@pytest.mark.parametrize(("window", "found"), [({"sliding_window": None}, None), ({}, 4096)])
def test_mistral_has_a_window_unless_it_is_null(tmp_path: Path, window: dict, found: int | None) -> None:
    config = {key: value for key, value in PUBLISHED["Mistral-7B-v0.1"][0].items() if key != "sliding_window"}
    assert _read(tmp_path, config | window).architecture.window_size == found
