"""Finds the family of a ``config.json``: ``known/qwen2.py`` reads ``model_type`` qwen2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import Family
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.weights import WeightMap
from megatron_rl.json_text import parse_json
from megatron_rl.registry import FAMILIES


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
