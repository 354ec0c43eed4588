"""What a family's file defines, and which family a ``config.json`` is of: ``known/qwen2.py`` reads model_type qwen2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.layout import MOST_EXPERTS, MOST_LAYERS, Architecture
from megatron_rl.families.weights import WeightMap, decoder_weights
from megatron_rl.json_text import parse_json
from megatron_rl.registry import FAMILIES


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


def read_qwen(config: HfConfig, **settings: Any) -> Architecture:
    """`read_decoder`, where a sliding window may be configured, but must not be in use."""
    config.expect("use_sliding_window", False, why="every layer attends to the whole sequence")
    config.whole("num_key_value_heads")  # its default is no function of the other sizes, so it is always written
    return read_decoder(config, **settings)


@dataclass(frozen=True)
class HfModel:
    """A directory in the Hugging Face format, understood."""

    directory: Path
    family: Family
    architecture: Architecture
    config: dict[str, Any]
    """``config.json`` as it is."""

    @property
    def weights(self) -> WeightMap:
        """Its tensors and the parameters made of them."""
        return self.family.weights(self.architecture)


def read_model(directory: str | Path) -> HfModel:
    """Read ``config.json`` of a directory.

    Raises:
        ConfigError: it is absent or malformed, of an unknown family, or asks for what is not built.
    """
    path = Path(directory) / "config.json"
    values = _load(path)
    family = _family_of(path, values)
    return HfModel(Path(directory), family, family.read(HfConfig(path, values)), values)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([
            f"{path} cannot be read ({error.strerror}); give a directory in the Hugging Face format, with config.json "
            "and *.safetensors"
        ]) from error
    except ValueError as error:
        raise ConfigError([f"{path} is not JSON ({error}); take the file the model was published with"]) from error
    if not isinstance(values, dict):
        raise ConfigError([f"{path} is not a JSON object; take the file the model was published with"])
    return values


def _family_of(path: Path, values: dict[str, Any]) -> Family:
    """By ``architectures``, which says more than ``model_type``: a reward model shares the latter."""
    families = [FAMILIES.get(name) for name in FAMILIES.names()]
    classes = values.get("architectures")
    wanted = classes[0] if isinstance(classes, list) and classes else None
    for family in families:
        if wanted == family.class_name or (wanted is None and values.get("model_type") == family.name):
            return family
    listed = ", ".join(f"{family.class_name} ({family.title})" for family in families)
    what = f"architecture {wanted}" if wanted is not None else f"model_type {values.get('model_type')}"
    raise ConfigError([f"{path}: {what} is not known here; known are {listed}"])
