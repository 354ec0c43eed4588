"""What a Hugging Face directory holds, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError, shorten
from megatron_rl.export.tensor_file import TensorEntry, TensorReader
from megatron_rl.json_text import parse_json

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255
_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
)
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json")


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint in full precision."""

    directory: Path
    config: dict[str, Any]
    shards: dict[str, dict[str, TensorEntry]]
    """File name -> its tensors, in the file's order."""
    small_files: tuple[Path, ...]
    """To be copied, relative to the directory: tokenizer, generation settings, chat templates, model code."""
    left_out: tuple[str, ...]
    """Weights in other files or formats: not read, not copied."""


def open_source(directory: Path) -> SourceModel:
    """Read ``config.json``, the index and all headers.

    Raises:
        CheckpointError: something is absent, damaged or quantised already; names the file.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}; give one with config.json and *.safetensors")
    shards = {name: _header(directory / name) for name in _shard_names(directory)}
    config = _json(directory / CONFIG)
    _refuse_quantised(directory, config)
    _refuse_duplicates(directory, shards)
    small, left_out = _other_files(directory, frozenset(shards))
    return SourceModel(directory, config, shards, small, left_out)


def _shard_names(directory: Path) -> list[str]:
    if (directory / INDEX).is_file():
        return _indexed_shards(directory)
    if (directory / SINGLE).is_file():
        return [SINGLE]
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(f"{directory} has {len(found)} safetensors files and no {INDEX} that says which belong")
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise CheckpointError(
            f"{directory} has only pickled weights (*.bin), which can run code when read; save it as safetensors first"
        )
    raise CheckpointError(f"there is no safetensors file in {directory}; give a directory with model.safetensors")


def _indexed_shards(directory: Path) -> list[str]:
    weight_map = _json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX} has no weight_map of tensor names to files; fetch it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or len(name) > _LONGEST_NAME:
            raise CheckpointError(f"{directory / INDEX} names {shorten(name)}, which is no safetensors file beside it")
        if not (directory / name).is_file():
            raise CheckpointError(f"shard {directory / name} is missing, {INDEX} names it; fetch it again")
    for name in names:
        held = _header(directory / name)
        absent = [tensor for tensor, file in weight_map.items() if file == name and tensor not in held]
        if absent:
            raise CheckpointError(f"{directory / name} lacks {absent[0]!r}, which {INDEX} places there; fetch it again")
    return names


def _header(path: Path) -> dict[str, TensorEntry]:
    with TensorReader(path) as reader:
        return reader.entries


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a Hugging Face checkpoint has one")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _refuse_quantised(directory: Path, config: dict[str, Any]) -> None:
    # A model with a vision tower nests its text_config.
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    marks = [f"{key} in {CONFIG}" for key in _QUANTIZATION_KEYS if any(part.get(key) for part in parts)]
    marks += [name for name in _QUANTIZATION_FILES if (directory / name).exists()]
    if marks:
        raise CheckpointError(f"{directory} is quantised already ({marks[0]}); give the bf16 checkpoint it came from")


def _refuse_duplicates(directory: Path, shards: dict[str, dict[str, TensorEntry]]) -> None:
    seen: dict[str, str] = {}
    for shard, entries in shards.items():
        for name in entries:
            if name in seen:
                raise CheckpointError(f"{directory}: {name!r} is in {seen[name]} and in {shard}; keep one of them")
            seen[name] = shard


def _other_files(directory: Path, shards: frozenset[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    small, left_out = [], []
    for path in sorted(directory.iterdir()):
        if path.name in shards or path.name in (CONFIG, INDEX) or path.name.startswith("."):
            continue
        if path.is_dir():
            templates = sorted(path.glob("*.jinja")) if path.name == "additional_chat_templates" else []
            small += [template.relative_to(directory) for template in templates]
            left_out += [] if templates else [path.name + "/"]
        elif path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
            left_out.append(path.name)
        else:
            small.append(Path(path.name))
    return tuple(small), tuple(left_out)
