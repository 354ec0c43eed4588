"""Qwen2 and Qwen2.5: biases on queries, keys and values only."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_qwen
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    config.expect("attention_bias", True, why="Qwen2 always has biases on queries, keys and values, and no others")
    return read_qwen(config, add_qkv_bias=True)


FAMILY = Family(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    title="Qwen2 and Qwen2.5",
    read=_read,
    examples=({**SMALL}, {**SMALL, "tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 1000000.0}),
)
