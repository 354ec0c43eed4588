"""Ministral: Mistral with a sliding window in some layers (``layer_types``)."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder
from megatron_rl.families.hf_config import HfConfig

_WINDOW = 4096
"""transformers' default if missing; ``null`` is no window."""


def _read(config: HfConfig) -> Architecture:
    config.whole("num_key_value_heads")  # its default is no function of the other sizes
    layers = config.whole("num_hidden_layers")
    if config.get("layer_types") is None and config.has("sliding_window") and config.get("sliding_window") is None:
        return read_decoder(config)
    every = layers + 1  # where layers are not listed, all have one
    return read_decoder(config, **config.windows(layers, every=every, size=_WINDOW))


FAMILY = Family(
    name="ministral",
    class_name="MinistralForCausalLM",
    title="Ministral",
    read=_read,
    examples=(
        {
            **SMALL, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {**SMALL, "layer_types": ["full_attention"] * 2, "head_dim": 8, "tie_word_embeddings": True},
    ),
)  # fmt: skip
