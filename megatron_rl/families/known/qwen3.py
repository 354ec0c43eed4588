"""Qwen3, dense: norms of queries and keys per head, and an independent head width."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_qwen
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    # Qwen3's default, independent of others, e.g. 16 heads of 128 with a residual stream of 1024.
    return read_qwen(config, qk_layernorm=True, kv_channels=config.whole("head_dim", 128))


FAMILY = Family(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    title="Qwen3",
    read=_read,
    examples=(
        {**SMALL, "head_dim": 16},
        {**SMALL, "head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
)
