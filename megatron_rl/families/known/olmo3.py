"""OLMo 3: OLMo 2 with sliding windows in three of four layers, without rotary scaling there."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.known.olmo2 import olmo_weights, read_olmo
from megatron_rl.families.rotation import rotations_by_kind

_BASE, _EVERY, _WINDOW = 500_000, 4, 4096
"""transformers' defaults."""


def _read(config: HfConfig) -> Architecture:
    config.expect("rope_theta", _BASE, why="transformers would take it for layers without a window alone")
    windows = config.windows(config.whole("num_hidden_layers"), every=_EVERY, size=_WINDOW)
    rotation = rotations_by_kind(config, _BASE, _BASE)
    if not windows:
        del rotation["rotary_base_local"]
    return read_olmo(config, rotation=rotation, **windows)


FAMILY = Family(
    name="olmo3",
    class_name="Olmo3ForCausalLM",
    title="OLMo 3",
    read=_read,
    weights=olmo_weights,
    examples=(
        {
            **SMALL,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "rope_theta": 5e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
)  # fmt: skip
