"""How many bytes a quantised weight takes. No torch here: the estimate and the recipes share it."""

from __future__ import annotations

from typing import Literal

Split = Literal["columns", "rows"]
"""How tensor-parallel ranks share a weight: its outputs (``ColumnParallelLinear``), or its inputs
(``RowParallelLinear``), where each rank's product is a part of the sum."""
TILE = 128
_ALIGNED = 16
"""Products of 8-bit codes want both dimensions in multiples of this."""


def stored_shape(recipe: str, rows: int, columns: int) -> tuple[int, int]:
    """The shape of the codes of a weight [rows, columns]: rounded up to what the kernels want."""
    multiple = TILE if recipe.startswith("fp8_block") else _ALIGNED
    return _round_up(rows, multiple), _round_up(columns, multiple)


def stored_bytes(recipe: str, rows: int, columns: int) -> int:
    """Bytes of the codes, a byte each, and the fp32 scales of a weight [rows, columns]; 0 for ``none``."""
    if recipe == "none":
        return 0
    stored_rows, stored_columns = stored_shape(recipe, rows, columns)
    codes = stored_rows * stored_columns
    if recipe.startswith("fp8_block"):
        return codes + 4 * (stored_rows // TILE) * (stored_columns // TILE)
    smoothing = 4 * columns if recipe == "int8_smooth" else 0
    return codes + 4 * stored_rows + smoothing


def tile_problem(rows: int, columns: int, split: Split | None) -> str | None:
    """Why tiles of a rank's part [rows, columns] of a weight would be other tiles than one rank's, if they would."""
    size = columns if split == "rows" else rows
    if split is None or size % TILE == 0:
        return None
    return f"a rank's part of {size} is no multiple of {TILE}, so its tiles would not be those of one rank"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
