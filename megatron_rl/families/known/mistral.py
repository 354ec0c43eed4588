"""Mistral: Llama's layers; early versions have a sliding window in all of them."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder
from megatron_rl.families.hf_config import HfConfig

_WINDOW = 4096
"""transformers' default if missing; ``null`` is no window."""


def _read(config: HfConfig) -> Architecture:
    config.expect("layer_types", why="all layers of Mistral are alike; such a model is a MinistralForCausalLM")
    config.whole("num_key_value_heads")  # its default is no function of the other sizes
    is_windowed = config.get("sliding_window") is not None or not config.has("sliding_window")
    return read_decoder(config, window_size=config.whole("sliding_window", _WINDOW) if is_windowed else None)


FAMILY = Family(
    name="mistral",
    class_name="MistralForCausalLM",
    title="Mistral",
    read=_read,
    examples=(
        {**SMALL, "sliding_window": None, "head_dim": 16},
        {**SMALL, "sliding_window": 16, "rope_theta": 1000000.0},
    ),
)
