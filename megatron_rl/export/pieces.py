"""One tensor from file to file, a few rows at a time, quantised on the way or as it is."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.export.selection import is_converted
from megatron_rl.export.target import TargetFormat
from megatron_rl.export.tensor_file import ITEM_BYTES, TensorEntry, TensorReader, TensorWriter
from megatron_rl.quantization.shapes import TILE

PIECE_NUMBERS = 1 << 20
"""Numbers quantised at a time: 4 MB as fp32, and a dozen intermediates."""
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def transfer(reader: TensorReader, writer: TensorWriter, name: str, target: TargetFormat) -> None:
    """Copy the tensor, or write its codes and scales.

    Raises:
        CheckpointError: it holds NaN or infinity, or a file fails.
    """
    entry = reader.entries[name]
    if not is_converted(name, entry.shape):
        for piece in reader.pieces(name, 8 * PIECE_NUMBERS):
            _require_finite(piece, entry, name, reader.path)
            writer.append(name, piece)
        return
    recipe, columns = target.recipe, entry.shape[1]
    for piece in reader.pieces(name, _rows_at_a_time(columns) * columns * ITEM_BYTES[entry.dtype]):
        weight = _require_finite(piece, entry, name, reader.path).view(-1, columns)
        quantised = recipe.quantize(weight)
        rows = quantised.rows
        writer.append(name, quantised.codes[:rows, :columns])
        scale_rows, _ = target.scale_shape(rows, columns)
        writer.append(target.scale_name(name), quantised.scales[:scale_rows])


def _rows_at_a_time(columns: int) -> int:
    """Whole tiles: no scale may reach over two pieces."""
    return max(TILE, PIECE_NUMBERS // max(1, columns) // TILE * TILE)


def _require_finite(raw: torch.Tensor, entry: TensorEntry, name: str, path: Path) -> torch.Tensor:
    """The bytes in the tensor's own type, flat, where it is a float of 16 bits or more; else as they are."""
    if entry.dtype not in _FLOATS:
        return raw
    values = raw.view(_FLOATS[entry.dtype])
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{path}: {name!r} holds NaN or infinity; give a checkpoint that is whole")
    return values
