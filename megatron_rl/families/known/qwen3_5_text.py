"""Qwen3.5, dense, text only: the layers of Qwen3-Next, with four DeltaNet projections instead of two."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL_DELTA, Family, read_gated_delta, read_qwen
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    return read_qwen(config, **read_gated_delta(config))


FAMILY = Family(
    name="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    title="Qwen3.5, text only",
    read=_read,
    passed_through=("mtp.",),
    examples=({**SMALL_DELTA, "tie_word_embeddings": True},),
)
