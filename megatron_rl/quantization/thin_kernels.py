"""Products of few tokens (decode steps) with 8-bit or bf16 weights: bound by reading the weights.

    weight [N, K] ──► column tiles x splits of K, a program each ──► parts [splits, M, N] ──► summed in order, scaled

If there are too few column tiles to fill a GPU, several programs share one, each with a part of K ("split-K"), and a
second kernel sums the parts in a fixed order, so results are reproducible. The number of splits depends only on the
weight's shape, so a row's bits do not depend on the number of rows. The weight is the left operand, whose tile has the
64 or more rows that Hopper's tensor cores need. With tile scales each product of `TILE` inputs is scaled before it is
added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_rl.arithmetic import TILE
from megatron_rl.quantization.dependent_launch import dependent, prefetch, wait

MOST_TOKENS = 128
"""For more tokens larger tiles are faster."""
_TILE = tl.constexpr(TILE)
_PREFETCHED = tl.constexpr(4)
"""Steps whose weights a program prefetches before it waits for the tokens; 128 bytes per column each."""
_SUMMED = 1024
"""Columns per program of the second kernel."""


class ThinTiles(NamedTuple):
    """A program's tile of the weight, its launch parameters, and the target number of programs."""

    columns: int
    depth: int
    warps: int
    stages: int
    programs: int
    least_steps: int = 1
    """Minimum steps of ``depth`` inputs per program: with fewer, partial sums would be as large as the weight."""

    def cut(self, columns: int, depth: int) -> tuple[int, int]:
        """Return the steps per split of ``depth`` inputs, and the number of splits."""
        steps, column_tiles = triton.cdiv(depth, self.depth), triton.cdiv(columns, self.columns)
        share = max(min(self.least_steps, steps), triton.cdiv(steps, max(1, min(steps, self.programs // column_tiles))))
        return share, triton.cdiv(steps, share)


_FEW = ThinTiles(columns=64, depth=128, warps=4, stages=6, programs=264)
_MORE = ThinTiles(columns=64, depth=128, warps=4, stages=4, programs=264)
"""The fastest of 18 on an H200 for the linears of a 7B model (docs/measurements/gpu.md); two programs for each of its
132 processors.
"""
_BF16 = _FEW._replace(depth=64, least_steps=4)
"""The bytes per step of 8-bit weights; not timed. With 32 rows, partial sums are at most a quarter of the weight."""


def tiles_for_few(tokens: int, dtype: torch.dtype = torch.int8) -> ThinTiles:
    """Return the tiles of a product with at most `MOST_TOKENS` tokens and a weight of ``dtype``."""
    return _BF16 if dtype == torch.bfloat16 else _FEW if tokens <= 32 else _MORE


def thin_product(
    codes: torch.Tensor, weight_codes: torch.Tensor, scales: torch.Tensor | None, weight_scales: torch.Tensor | None,
    dtype: torch.dtype, tiles: ThinTiles | None = None, tiled: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return ``dtype`` [M, N] ``(codes weight_codes^T) x scales x weight_scales^T``.

    int8, float8_e4m3fn or (without scales) bfloat16 [M, K] and [N, K], M up to 128, of any row stride, contiguous along
    K. fp32 ``scales`` [M, 1] and ``weight_scales`` [N, 1], contiguous; or ``tiled``: of 1 x 128 segments [M, S] and 128
    x 128 tiles [at least N / 128, S]. int8 has exact sums and one fp32 rounding per operation; fp8 and bf16 sums are
    fp32, except within the 128 products of an fp8 tile, which Hopper sums in fewer bits.
    """
    (rows, depth), columns = codes.shape, weight_codes.shape[0]
    tiles = tiles or tiles_for_few(rows, codes.dtype)
    share, splits = tiles.cut(columns, depth)
    scale_strides = (0, 0, 0) if scales is None else (*scales.stride(), weight_scales.stride(0))
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    sums = torch.int32 if codes.dtype == torch.int8 else torch.float32
    parts = out if splits == 1 else torch.empty(splits, rows, columns, dtype=sums, device=codes.device)
    thin_kernel[(triton.cdiv(columns, tiles.columns), splits)](
        codes, weight_codes, parts, scales, weight_scales, rows, columns, depth, codes.stride(0),
        weight_codes.stride(0), *scale_strides, TILED=tiled,
        ROWS=max(16, triton.next_power_of_2(rows)), COLUMNS=tiles.columns, DEPTH=tiles.depth, STEPS=share,
        WHOLE=splits == 1, EVEN=depth % (share * tiles.depth) == 0 and columns % tiles.columns == 0,
        num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False, **dependent(),
    )  # fmt: skip
    if splits > 1:
        parts_kernel[(rows, triton.cdiv(columns, _SUMMED))](
            parts, out, *((None, None) if tiled else (scales, weight_scales)), rows, columns, SPLITS=splits,
            BLOCK=_SUMMED, num_warps=4, enable_fp_fusion=False, **dependent(),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "scale_stride", "segment_stride"])
def thin_kernel(
    codes, weight_codes, out, scales, weight_scales, rows, columns, depth, code_stride, weight_stride,
    scale_stride, segment_stride, tile_stride,
    TILED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Multiply codes: a program has all tokens, COLUMNS outputs and STEPS x DEPTH inputs; ``out`` or partial sums."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.program_id(1) * STEPS * DEPTH + tl.arange(0, DEPTH)
    real_row, real_column = row < rows, column < columns
    tokens = codes + row[None, :].to(tl.int64) * code_stride + step[:, None]
    weight = weight_codes + column[:, None].to(tl.int64) * weight_stride + step[None, :]
    sums: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    result = tl.zeros((COLUMNS, ROWS), dtype=sums)
    start = tl.program_id(1) * STEPS * DEPTH
    if PDL:
        ahead = tl.minimum(start + tl.arange(0, min(STEPS, _PREFETCHED)) * DEPTH, depth - 1)[None, :]
        prefetch(weight_codes + tl.minimum(column, columns - 1)[:, None].to(tl.int64) * weight_stride + ahead)
    wait(PDL)
    if TILED:
        tile_scales = weight_scales + tl.program_id(0) * COLUMNS // _TILE * tile_stride
        following = _tile_scales(scales + row * scale_stride, tile_scales, segment_stride, start, depth, real_row)
    for index in range(0, STEPS):
        if EVEN:
            left = tl.load(weight)
            right = tl.load(tokens, mask=real_row[None, :], other=0.0)
        else:
            rest = step < depth - index * DEPTH
            left = tl.load(weight, mask=real_column[:, None] & rest[None, :], other=0.0)
            right = tl.load(tokens, mask=real_row[None, :] & rest[:, None], other=0.0)
        if TILED:  # scales are loaded a step ahead: nothing waits for them
            factor, start = following, start + DEPTH
            following = _tile_scales(scales + row * scale_stride, tile_scales, segment_stride, start, depth, real_row)
            result += tl.dot(left, right, out_dtype=sums) * factor[None, :]
        else:  # after a tile the sum goes on in fp32
            result = tl.dot(left, right, result, out_dtype=sums, max_num_imprecise_acc=DEPTH)
        weight += DEPTH
        tokens += DEPTH
    place = row[None, :] * columns + column[:, None]
    inside = real_row[None, :] & real_column[:, None]
    if WHOLE and not TILED and scales is not None:
        by_row = tl.load(scales + row, mask=real_row, other=0.0)[None, :]
        by_column = tl.load(weight_scales + column, mask=real_column, other=0.0)[:, None]
        result = result.to(tl.float32) * by_row * by_column
    part = out + tl.program_id(1).to(tl.int64) * rows * columns
    tl.store(part + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile_scales(scales, tile_scales, segment_stride, start, depth, real_row):
    """Return the factors [ROWS] of products of inputs from ``start`` on; 0 from ``depth`` on."""
    segment = start // _TILE
    by_row = tl.load(scales + segment * segment_stride, mask=real_row & (start < depth), other=0.0)
    return by_row * tl.load(tile_scales + segment, mask=start < depth, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def parts_kernel(
    parts, out, scales, weight_scales, rows, columns, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Sum the parts; one program per BLOCK outputs of a token."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * columns + column
    total = tl.load(parts + place, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * (rows.to(tl.int64) * columns) + place, mask=inside, other=0.0)
    total = total.to(tl.float32)
    if scales is not None:
        total *= tl.load(scales + row)
        total *= tl.load(weight_scales + column, mask=inside, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
