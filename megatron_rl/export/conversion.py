"""A checkpoint in full precision -> one in 8 bits.

    input shard -> rows of a tensor -> recipe -> codes, scales -> output shard of the same name

One tensor's rows are in memory at a time, about 50 MB with all intermediates whatever the model's size (more where
128 rows are more than a million numbers).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import CheckpointError
from megatron_rl.export.directory import whole_or_absent
from megatron_rl.export.pieces import transfer
from megatron_rl.export.selection import is_converted, modules_left_alone
from megatron_rl.export.source import CONFIG, INDEX, SourceModel, open_source
from megatron_rl.export.target import TargetFormat
from megatron_rl.export.tensor_file import TensorEntry, TensorReader, TensorWriter
from megatron_rl.quantization.shapes import TILE

logger = logging.getLogger(__name__)

_CONVERTIBLE = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class ConversionReport:
    """What became of the tensors."""

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
    model = open_source(source)
    plans = {shard: _plan(entries, target) for shard, entries in model.shards.items()}
    report = _report(model, plans, target)
    _check(model, report)
    with whole_or_absent(output, source, overwrite) as directory:
        _require_space(directory, report.bytes_after)
        for number, (shard, plan) in enumerate(plans.items(), start=1):
            with TensorReader(source / shard) as reader, TensorWriter(directory / shard, plan) as writer:
                for name in reader.entries:
                    transfer(reader, writer, name, target)
            logger.info("%s (%d of %d)", shard, number, len(plans))
        _write_json(directory / INDEX, _index(plans))
        _write_json(directory / CONFIG, {**model.config, "quantization_config": _quantization_config(model, target)})
        _copy(model, directory)
    return report


# -- before anything is written ------------------------------------------------------------------


def _plan(entries: dict[str, TensorEntry], target: TargetFormat) -> dict[str, TensorEntry]:
    """The header of the output shard."""
    plan: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if is_converted(name, entry.shape):
            rows, columns = entry.shape
            plan[name] = TensorEntry(target.code_type, entry.shape)
            plan[target.scale_name(name)] = TensorEntry("F32", target.scale_shape(rows, columns))
        else:
            plan[name] = entry
    return plan


def _tensors(model: SourceModel) -> Iterator[tuple[str, TensorEntry]]:
    for entries in model.shards.values():
        yield from entries.items()


def _report(model: SourceModel, plans: dict[str, dict[str, TensorEntry]], target: TargetFormat) -> ConversionReport:
    converted = {name: entry.shape for name, entry in _tensors(model) if is_converted(name, entry.shape)}
    ragged = [name for name, shape in converted.items() if any(size > TILE and size % TILE for size in shape)]
    return ConversionReport(
        converted=tuple(converted),
        kept=tuple(name for name, _ in _tensors(model) if name not in converted),
        ragged=() if target.number else tuple(ragged),
        left_out=model.left_out,
        bytes_before=sum(entry.bytes for _, entry in _tensors(model)),
        bytes_after=sum(entry.bytes for plan in plans.values() for entry in plan.values()),
    )


def _check(model: SourceModel, report: ConversionReport) -> None:
    if not report.converted:
        some = ", ".join(report.kept[:2]) or "none at all"
        raise CheckpointError(
            f"{model.directory} has no linear layer by a name known here (model.layers.0.self_attn.q_proj.weight and "
            f"the like; it has {some}); nothing to convert"
        )
    for shard, entries in model.shards.items():
        for name, entry in entries.items():
            if is_converted(name, entry.shape) and entry.dtype not in _CONVERTIBLE:
                raise CheckpointError(
                    f"{model.directory / shard} holds {name!r} as {entry.dtype}; "
                    "give a checkpoint in bf16, fp16 or fp32"
                )


def _require_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"{directory} cannot be written: {needed / 2**20:,.1f} MiB are needed and {free / 2**20:,.1f} MiB are "
            "free; free space or choose another directory"
        )


# -- the files beside ------------------------------------------------------------------------------


def _quantization_config(model: SourceModel, target: TargetFormat) -> dict[str, object]:
    kept = [(name, entry.shape) for name, entry in _tensors(model) if not is_converted(name, entry.shape)]
    return target.quantization_config(modules_left_alone(kept))


def _index(plans: dict[str, dict[str, TensorEntry]]) -> dict[str, object]:
    weight_map = {name: shard for shard, plan in plans.items() for name in plan}
    total = sum(entry.bytes for plan in plans.values() for entry in plan.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, content: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error) from error


def _copy(model: SourceModel, directory: Path) -> None:
    for file in model.small_files:
        try:
            (directory / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(model.directory / file, directory / file)  # what a link points to: hubs' caches are links
        except OSError as error:
            raise _cannot_write(directory / file, error) from error


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another directory")
