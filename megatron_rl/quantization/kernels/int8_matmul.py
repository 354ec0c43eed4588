"""The product of int8 codes, accumulated in int32, scaled in its epilogue.

Tile sizes come from a small table by the number of tokens, not from autotuning: tuning launches and times
kernels at the first call of each shape, which a CUDA-graph capture forbids, and two ranks could choose
differently. Integer sums do not depend on the tiles, so the table cannot change a result. As with any Triton
kernel the first call compiles: run each tile choice once before a capture.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_COLUMNS = (2**31 - 1) // 127**2
"""The longest sum of products of codes within +-127 that cannot overflow int32."""
_GROUP = 8


class Tiles(NamedTuple):
    """Rows, columns and depth of a program's tile, and how it is run."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_TABLE = (
    (16, Tiles(16, 32, 256, 4, 4)),
    (32, Tiles(32, 32, 256, 4, 4)),
    (64, Tiles(64, 64, 128, 4, 4)),
    (128, Tiles(128, 64, 128, 4, 4)),
)
"""Decode reads the whole weight for few tokens: narrow column tiles keep all SMs of a GPU busy at N = 4096."""
_MANY_TOKENS = Tiles(128, 128, 128, 8, 3)


def tiles_for(tokens: int) -> Tiles:
    """The tiles of a product with that many tokens."""
    return next((tiles for most, tiles in _TABLE if tokens <= most), _MANY_TOKENS)


def int8_matmul(
    codes: torch.Tensor,
    weight_codes: torch.Tensor,
    scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``dtype`` [M, N] ``(codes weight_codes^T) x scales x weight_scales^T``, one fp32 rounding an operation.

    Of int8 [M, K] and int8 [N, K]: rows may have any stride, columns are adjacent; ValueError where K is above 133,144.
    fp32 ``scales`` [M, 1] and ``weight_scales`` [N, 1], contiguous; without them the exact int32 sums, for layers split
    over ranks by rows: theirs are added up before any scale. To leave out padding rows of the weight, pass slices.
    """
    (rows, depth), columns = codes.shape, weight_codes.shape[0]
    out = torch.empty(rows, columns, dtype=torch.int32 if scales is None else dtype, device=codes.device)
    if depth > MAX_COLUMNS:
        raise ValueError(f"sums of {depth} products could overflow int32; use at most {MAX_COLUMNS} columns")
    tiles = tiles_for(rows)
    matmul_kernel[(triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns),)](
        codes, weight_codes, out, scales, weight_scales, rows, columns, depth, codes.stride(0), weight_codes.stride(0),
        out.stride(0), ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, STEPS=triton.cdiv(depth, tiles.depth),
        EVEN=depth % tiles.depth == 0, GROUP=_GROUP, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    codes, weight_codes, out, scales, weight_scales, rows, columns, depth, code_stride, weight_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One program a tile ROWS x COLUMNS of ``out``; raw accumulators where ``scales`` is None.

    STEPS is a constant, hence a compilation a depth: Triton's interpreter cannot loop to a bound read at run time.
    """
    row_tile, column_tile = _tile_of(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS), GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    a = codes + row[:, None].to(tl.int64) * code_stride + step[None, :]
    b = weight_codes + column[None, :].to(tl.int64) * weight_stride + step[:, None]
    real_row, real_column = row < rows, column < columns
    result = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for index in range(0, STEPS):
        if EVEN:
            left = tl.load(a, mask=real_row[:, None], other=0)
            right = tl.load(b, mask=real_column[None, :], other=0)
        else:
            rest = step < depth - index * DEPTH
            left = tl.load(a, mask=real_row[:, None] & rest[None, :], other=0)
            right = tl.load(b, mask=real_column[None, :] & rest[:, None], other=0)
        result = tl.dot(left, right, result, out_dtype=tl.int32)
        a += DEPTH
        b += DEPTH
    if scales is not None:
        by_row = tl.load(scales + row, mask=real_row, other=0.0)[:, None]
        by_column = tl.load(weight_scales + column, mask=real_column, other=0.0)[None, :]
        result = result.to(tl.float32) * by_row * by_column
    place = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])


@triton.jit
def _tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Programs go down GROUP row tiles before the next column tile, so that the L2 cache serves the weight."""
    in_group = GROUP * column_tiles
    first = (program // in_group) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + (program % in_group) % height, (program % in_group) // height
