"""A Hugging Face checkpoint in full precision -> one in 8 bits, in the formats that other engines load.

    input shard -> rows of a tensor -> recipe of the rollouts -> codes, scales -> output shard of the same name

One tensor's rows are in memory at a time, about 40 MB with all intermediates whatever the model's size (more where
128 rows, or one expert of a fused tensor, are more than a quarter of a million numbers).

docs/export.md says which tensors are converted and what each format writes.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.arithmetic import TILE
from megatron_rl.atomic import whole_directory
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families.hf_config import read_object
from megatron_rl.registry import RECIPES, unknown
from megatron_rl.tensor_files import (
    INDEX_FILE,
    ITEM_BYTES,
    StoredTensor,
    TensorEntry,
    TensorReader,
    TensorWriter,
    cannot_write,
    write_index,
    write_json,
)

CONFIG = "config.json"
PIECE_NUMBERS = 1 << 18
"""Numbers quantised at a time: 1 MB as fp32, and a dozen intermediates."""
_CONVERTIBLE = ("BF16", "F16", "F32")
_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
)
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json")
_LINEARS = (
    r"(q|k|v|o|qkv)_proj",  # attention; one matrix for all three in Phi-3
    r"(q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa",  # DeepSeek's latent attention
    r"(gate|up|down|gate_up)_proj",  # MLP, experts, shared experts
    r"experts\.\d+\.w[123]",  # Mixtral's experts
)
_CONVERTED = re.compile(
    r"(model\.|language_model\.|text_model\.)*layers\.\d+\.(self_attn|mlp|block_sparse_moe)\."
    rf"(.+\.)?({'|'.join(_LINEARS)})\.weight"
)
_EMBEDDING = re.compile(r"(^|\.)\w*(embed|wte|wpe)\w*(\.|$)")
_NORM = re.compile(r"(^|\.)\w*norm\w*\.weight$")
_OUTPUT_HEAD = "lm_head"


@dataclass(frozen=True)
class TargetFormat:
    """One format. The number type of a compressed-tensors format is ``float`` or ``int``; None: tiles."""

    name: str
    recipe_name: str
    """The rollouts' own recipe, whose codes and scales these are."""
    code_type: str
    """As safetensors headers write it."""
    scale_suffix: str
    """``X.weight`` -> ``X.weight_scale_inv``, ``X.weight_scale``."""
    number: str | None = None
    powers_of_two: bool = False

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight [rows, columns]."""
        return (rows, 1) if self.number else (-(-rows // TILE), -(-columns // TILE))

    def quantization_config(self, skipped: Sequence[str]) -> dict[str, Any]:
        """Write the entry of ``config.json``; ``skipped`` are the modules left in full precision."""
        if self.number is not None:
            return self._compressed_tensors(self.number, skipped)
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [TILE, TILE],
            "modules_to_not_convert": list(skipped),
        }
        return {**config, "scale_fmt": "ue8m0"} if self.powers_of_two else config

    @staticmethod
    def _compressed_tensors(number: str, skipped: Sequence[str]) -> dict[str, Any]:
        def numbers(strategy: str, dynamic: bool) -> dict[str, Any]:
            return {"num_bits": 8, "type": number, "symmetric": True, "strategy": strategy, "dynamic": dynamic}

        form = f"{number}-quantized"
        group = {
            "targets": ["Linear"],
            "weights": numbers("channel", dynamic=False),
            "input_activations": numbers("token", dynamic=True),
            "output_activations": None,
            "format": form,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(skipped),
            "kv_cache_scheme": None,
        }


FORMATS = {
    "fp8_block": TargetFormat("fp8_block", "fp8_block", "F8_E4M3", "_scale_inv"),
    "fp8_channel": TargetFormat("fp8_channel", "fp8", "F8_E4M3", "_scale", number="float"),
    "int8": TargetFormat("int8", "int8", "I8", "_scale", number="int"),
}
_BLOCK_POW2 = TargetFormat("fp8_block", "fp8_block_pow2", "F8_E4M3", "_scale_inv", powers_of_two=True)


def target_format(name: str, powers_of_two: bool | None = None) -> TargetFormat:
    """Return the format of that name; with None its default, powers of two where it has them.

    Raises:
        ConfigError: there is none, or it has no scales that are powers of two.
    """
    if name not in FORMATS:
        raise ConfigError([f"there is no export format {unknown(name, FORMATS)}"])
    if name == "fp8_block":
        return FORMATS[name] if powers_of_two is False else _BLOCK_POW2
    if powers_of_two:
        raise ConfigError(
            [f"--force-pow-2-scale True is for fp8_block, {name} has no such variant; use --format fp8_block, or False"]
        )
    return FORMATS[name]


def is_converted(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for the weight [N, K] of a linear layer of the decoder."""
    return len(shape) == 2 and _CONVERTED.fullmatch(name) is not None


def modules_left_alone(kept: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Return the modules a loader has to leave in full precision, of the tensors that were kept.

    The output head always; a router and any other tensor of two or more dimensions by its module's name, or a loader
    that looks at layer types would take its weight for codes.
    """
    names = {
        name.rpartition(".")[0]
        for name, shape in kept
        if len(shape) >= 2 and not _EMBEDDING.search(name) and not _NORM.search(name)
    }

    def by_number(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    return [_OUTPUT_HEAD, *sorted(names - {_OUTPUT_HEAD, ""}, key=by_number)]


# -- the conversion --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConversionReport:
    """The tensors that were quantised and those that were copied."""

    converted: tuple[str, ...]
    kept: tuple[str, ...]
    ragged: tuple[str, ...]
    """Converted in tiles, with a dimension above 128 that 128 does not divide."""
    left_out: tuple[str, ...]
    """Files of the input that were neither read nor copied."""
    bytes_before: int
    bytes_after: int


def convert(source: Path, output: Path, target: TargetFormat, overwrite: bool = False) -> ConversionReport:
    """Write ``output``, whole or not at all.

    Raises:
        CheckpointError: the input is absent, damaged, quantised, not finite or without linear layers that are known;
            the output is there, overlaps the input, or cannot be written.
    """
    with TensorReader(source) as reader:
        stored, config = reader.stored, read_object(source / CONFIG, CheckpointError)
        converted = dict.fromkeys(name for name, tensor in stored.items() if is_converted(name, tensor.shape))
        _refuse_unfit(source, config, stored, converted)
        small_files, left_out = _other_files(source, {tensor.file.name for tensor in stored.values()})
        files = _plan(stored, target)
        ragged = [name for name in converted if any(size > TILE and size % TILE for size in stored[name].shape)]
        kept = [name for name in stored if name not in converted]
        report = ConversionReport(
            converted=tuple(converted),
            kept=tuple(kept),
            ragged=() if target.number else tuple(ragged),
            left_out=left_out,
            bytes_before=sum(tensor.num_bytes for tensor in stored.values()),
            bytes_after=sum(entry.num_bytes for entries in files.values() for entry in entries.values()),
        )
        with whole_directory(output, source, overwrite) as directory:
            if (free := shutil.disk_usage(directory).free) < report.bytes_after:
                sizes = f"{report.bytes_after / 2**20:,.1f} MiB are needed and {free / 2**20:,.1f} MiB are free"
                raise CheckpointError(
                    f"{directory} cannot be written: {sizes}; free space or choose another directory"
                )
            with TensorWriter(directory, files) as writer:
                for name in stored:
                    _transfer(reader, writer, name, target)
            write_index(directory, files)
            left_alone = modules_left_alone((name, stored[name].shape) for name in kept)
            quantization = target.quantization_config(left_alone)
            write_json(directory / CONFIG, {**config, "quantization_config": quantization})
            for file in small_files:
                try:
                    (directory / file).parent.mkdir(exist_ok=True)
                    shutil.copyfile(source / file, directory / file)  # what a link points to: hubs' caches are links
                except OSError as error:
                    raise cannot_write(directory / file, error) from error
    return report


# -- before anything is written ------------------------------------------------------------------


def _refuse_unfit(
    directory: Path, config: dict[str, Any], stored: Mapping[str, StoredTensor], converted: Mapping[str, None]
) -> None:
    # A model with a vision tower nests its text_config.
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    marks = [f"{key} in {CONFIG}" for key in _QUANTIZATION_KEYS if any(part.get(key) for part in parts)]
    marks += [name for name in _QUANTIZATION_FILES if (directory / name).exists()]
    if marks:
        raise CheckpointError(f"{directory} is quantised already ({marks[0]}); give the bf16 checkpoint it came from")
    if not converted:
        some = ", ".join(list(stored)[:2]) or "none at all"
        raise CheckpointError(
            f"{directory} has no linear layer by a name known here (model.layers.0.self_attn.q_proj.weight and "
            f"the like; it has {some}); nothing to convert"
        )
    for name, tensor in stored.items():
        if tensor.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{tensor.file} holds {name!r} of type {tensor.dtype}, which is unknown here")
        if name in converted and tensor.dtype not in _CONVERTIBLE:
            raise CheckpointError(
                f"{tensor.file} holds {name!r} as {tensor.dtype}; give a checkpoint in bf16, fp16 or fp32"
            )


def _plan(stored: Mapping[str, StoredTensor], target: TargetFormat) -> dict[str, dict[str, TensorEntry]]:
    """The output's files and what each holds."""
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, tensor in stored.items():
        entries = files.setdefault(tensor.file.name, {})
        if is_converted(name, tensor.shape):
            entries[name] = TensorEntry(target.code_type, tensor.shape)
            entries[name + target.scale_suffix] = TensorEntry("F32", target.scale_shape(*tensor.shape))
        else:
            entries[name] = tensor
    return files


# -- the tensors, and the files beside them ------------------------------------------------------


def _transfer(reader: TensorReader, writer: TensorWriter, name: str, target: TargetFormat) -> None:
    """Copy the tensor, or write its codes and scales.

    Raises:
        CheckpointError: it holds NaN or infinity, or a file fails.
    """
    shape = reader.stored[name].shape
    converts = is_converted(name, shape)
    rows = PIECE_NUMBERS // max(1, math.prod(shape[1:]))
    if converts:  # whole tiles: no scale may reach over two pieces
        rows = max(TILE, rows // TILE * TILE)
    recipe, scales = RECIPES.get(target.recipe_name), name + target.scale_suffix
    for piece in reader.pieces(name, max(1, rows)):
        if piece.is_floating_point() and piece.itemsize > 1 and not bool(piece.isfinite().all()):
            path = reader.stored[name].file
            raise CheckpointError(f"{path}: {name!r} holds NaN or infinity; give a checkpoint that is whole")
        if not converts:
            writer.append(name, piece)
            continue
        quantised = recipe.quantize(piece)
        height, width = piece.shape
        writer.append(name, quantised.codes[:height, :width])
        scale_rows, _ = target.scale_shape(height, width)
        writer.append(scales, quantised.scales[:scale_rows])


def _other_files(directory: Path, shards: set[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Relative paths to copy (tokenizer, generation settings, chat templates, model code), and names of the rest."""
    small, left_out = [], []
    for path in sorted(directory.iterdir()):
        if path.name in (*shards, CONFIG, INDEX_FILE) or path.name.startswith("."):
            continue
        if path.is_dir():
            templates = sorted(path.glob("*.jinja")) if path.name == "additional_chat_templates" else []
            small += [template.relative_to(directory) for template in templates]
            left_out += [] if templates else [path.name + "/"]
        elif path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
            left_out.append(path.name)
        else:
            small.append(Path(path.name))
    return small, tuple(left_out)
