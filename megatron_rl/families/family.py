"""What a family's file defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.families.architecture import MOST_EXPERTS, MOST_LAYERS, Architecture
from megatron_rl.families.decoder import decoder_weights
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.weights import WeightMap


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that share a ``config.json`` and a naming of tensors."""

    name: str
    """That of its file, and ``model_type`` in ``config.json``."""
    class_name: str
    """In ``architectures`` of ``config.json``."""
    title: str
    """For people: ``Qwen2 and Qwen2.5``."""
    read: Callable[[HfConfig], Architecture]
    """Raises ``ConfigError`` for anything in the file that is not built."""
    weights: Callable[[Architecture], WeightMap] = decoder_weights
    examples: tuple[Mapping[str, Any], ...]
    """Entries of ``config.json`` of small models that between them have every feature: the contract test's."""


SMALL: Mapping[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
"""A model for examples."""


def read_decoder(config: HfConfig, **settings: Any) -> Architecture:
    """What all families derived from Llama write alike; ``settings`` are the rest."""
    config.expect("hidden_act", "silu", why="the MLP's gate is silu")
    config.expect("attention_dropout", 0, why="attention kernels here have no dropout")
    config.expect("quantization_config", why="weights are read as they were trained; take the unquantised model")
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    base, factor = config.rope()
    scaling = {} if factor is None else {"use_rope_scaling": True, "rope_scaling_factor": factor}
    architecture = Architecture(
        **{
            "num_layers": config.whole("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": config.whole("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": config.whole("num_key_value_heads", heads),
            "kv_channels": config.whole("head_dim", max(1, hidden // heads)),
            "vocab_size": config.whole("vocab_size"),
            "max_position_embeddings": config.whole("max_position_embeddings"),
            "rotary_base": base,
            "norm_epsilon": config.number("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not config.switch("tie_word_embeddings", False),
            "init_method_std": config.number("initializer_range", 0.02),
            **scaling,
            **settings,
        }
    )
    config.layer_types(architecture.num_layers)
    if architecture.num_layers > MOST_LAYERS:
        config.refuse("num_hidden_layers", architecture.num_layers, f"at most {MOST_LAYERS} layers are")
    elif architecture.num_layers * (architecture.num_experts or 0) > MOST_EXPERTS:
        config.refuse("num_experts", architecture.num_experts, f"at most {MOST_EXPERTS:,} in all layers together are")
    config.check()
    return architecture


def full_attention_only(config: HfConfig) -> None:
    """Qwen's sliding window may be configured, but must not be in use."""
    config.expect("use_sliding_window", False, why="every layer attends to the whole sequence")
