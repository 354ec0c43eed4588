"""Triton kernels for quantised rollouts, on CUDA or in Triton's interpreter; defined by `quantization.formats`.

Scales are bit-identical to it, and codes except for the sign of zeros. Quantisation is one memory-bound pass: each
number is read once and stays in registers between its group's maximum and its code; weights go to fixed buffers.
Divisions are correctly rounded, unlike Triton's ``/`` on a GPU. Maxima are taken over bit patterns, which order like
magnitudes and propagate NaN like torch's ``amax``, unlike Triton's ``max``.

`int8_matmul` leaves few tokens to `thin_product`. Tile sizes come from a table by token count. Autotuning would time
kernels at the first call of each shape, which CUDA-graph capture forbids, and ranks could choose differently. Integer
sums do not depend on tiles.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_rl.arithmetic import TILE
from megatron_rl.quantization import formats
from megatron_rl.quantization.recipe import PackedActivations, Packing
from megatron_rl.quantization.thin_kernels import MOST_TOKENS, thin_product

MAX_COLUMNS = 65536
"""A row is held in the registers of one program; longer ones would spill."""
FEW_ROWS = 256
"""Up to so many rows (a decode step) there are fewer programs than a GPU can run at once."""
_SEGMENT_ROWS = 16
MOST_SUMMED = (2**31 - 1) // 127**2
"""Largest number of products of codes within +-127 whose sum cannot overflow int32."""
_GROUP = 8


def _bits_of(number: float) -> int:
    return struct.unpack("<i", struct.pack("<f", number))[0]


_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter truncates in casts to E4M3, its rounding mode "rtne" loses the carry, and `tl.fma` rounds twice."""
_TILE = tl.constexpr(TILE)
_INT8_MAX, _FP8_MAX = tl.constexpr(formats.INT8_MAX), tl.constexpr(formats.FP8_MAX)
_FLOOR_BITS = tl.constexpr(_bits_of(formats.AMAX_FLOOR))
_INTEGER_MAGIC = tl.constexpr(1.5 * 2**23)
"""fp32 represents the integers from 2^23 to 2^24: adding it rounds a small number to the nearest even integer."""
_INTEGER_MAGIC_BITS = tl.constexpr(_bits_of(1.5 * 2**23))
_E4M3_MAGIC = tl.constexpr(1.5 * 2**20)
"""Adding it, times a number's own power of two, leaves three bits behind the leading one."""
_E4M3_SMALLEST_NORMAL_BITS = tl.constexpr(_bits_of(2.0**-6))
_EXPONENT_BITS = tl.constexpr(0x7F800000)
_MANTISSA_BITS = tl.constexpr(0x7FFFFF)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitude_bits(values):
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS


@triton.jit
def scale_of(amax_bits, code_type: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return `formats.scale_of` for ``code_type``, optionally rounded by `formats.power_of_two`."""
    largest: tl.constexpr = _INT8_MAX if code_type == tl.int8 else _FP8_MAX
    scale = tl.div_rn(tl.maximum(amax_bits, _FLOOR_BITS).to(tl.float32, bitcast=True), largest)
    if POWER_OF_TWO:
        raised = (scale.to(tl.int32, bitcast=True) + _MANTISSA_BITS) & _EXPONENT_BITS
        scale = raised.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def e4m3_of(scaled):
    """Round fp32 numbers within +-448 to E4M3, to nearest even; in the interpreter before the cast."""
    if _INTERPRETED:
        exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) & _EXPONENT_BITS, _E4M3_SMALLEST_NORMAL_BITS)
        magic = exponent.to(tl.float32, bitcast=True) * _E4M3_MAGIC
        scaled = (scaled + magic) - magic
    return scaled.to(tl.float8e4nv)


@triton.jit
def quotient(values, divisor):
    """Return ``values / divisor``, correctly rounded where codes depend on it, with one division for all values.

    A product with the inverse, corrected by fused products: P. Markstein, IBM J. Res. Dev. 34 (1990) 111.
    """
    if _INTERPRETED:
        result = tl.div_rn(values, divisor)
    else:
        inverse = tl.div_rn(1.0, divisor)
        near = values * inverse
        result = tl.fma(tl.fma(near, -divisor, values), inverse, near)
    return result


@triton.jit
def codes_of(values, scale, code_type: tl.constexpr):
    """Return `formats.integer_codes` or `formats.fp8_codes`.

    The integer is read from the sum's bits, so that the compiler cannot optimise the magic number away.
    """
    largest: tl.constexpr = _INT8_MAX if code_type == tl.int8 else _FP8_MAX
    scaled = tl.minimum(tl.maximum(quotient(values, scale), -largest), largest)
    if code_type == tl.int8:
        codes = ((scaled + _INTEGER_MAGIC).to(tl.int32, bitcast=True) - _INTEGER_MAGIC_BITS).to(tl.int8)
    else:
        codes = e4m3_of(scaled)
    return codes


@triton.jit
def rows_kernel(
    values, codes, scales, smoothing, columns, code_columns, value_stride, code_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize rows; one program per row, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(values + row * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    if smoothing is not None:
        x = tl.div_rn(x, tl.load(smoothing + column, mask=inside, other=1.0))
    scale = scale_of(tl.max(magnitude_bits(x), 0), codes.dtype.element_ty, False)
    tl.store(scales + row, scale)
    written = codes_of(x, scale, codes.dtype.element_ty)
    tl.store(codes + row * code_stride + column, written, mask=column < code_columns)


# Scale strides depend on the number of tokens: specialisation would compile kernels for 1 and for multiples of 16 in
# the middle of a run.
@triton.jit(do_not_specialize=["rows", "code_rows", "scale_row_stride", "scale_column_stride"])
def blocks_kernel(
    values, codes, scales, rows, columns, code_rows, code_columns, value_stride, code_stride,
    scale_row_stride, scale_column_stride,
    POWER_OF_TWO: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize blocks to E4M3; one program per ROWS x 128, with one scale if WHOLE, else one per row."""
    block = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = (block * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tile * _TILE + tl.arange(0, _TILE))[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(values + row * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    if WHOLE:
        group = block
        real = block * ROWS < rows
        amax_bits = tl.max(tl.max(magnitude_bits(x), 1), 0)
    else:
        group = row
        real = row < rows
        amax_bits = tl.max(magnitude_bits(x), 1)[:, None]
    scale = scale_of(amax_bits, codes.dtype.element_ty, POWER_OF_TWO)
    tl.store(scales + group * scale_row_stride + tile * scale_column_stride, scale, mask=real)
    written = (row < code_rows) & (column < code_columns)
    tl.store(codes + row * code_stride + column, codes_of(x, scale, codes.dtype.element_ty), mask=written)


def quantize(values: torch.Tensor, packing: Packing) -> PackedActivations:
    """Quantise activations [T, K], bf16, fp16 or fp32, of any stride, as specified by ``packing``.

    Raises:
        ValueError: K is above 65536, with scales per token.
    """
    packed = packing.allocate(values.shape[0], values.dtype, values.device)
    if packing.in_segments:
        requantize_blocks(values, packed.codes, packed.scales, whole=False, power_of_two=packing.power_of_two)
    else:
        requantize_rows(values, packed.codes, packed.scales, packing.smoothing)
    return packed


def requantize_rows(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, smoothing: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``codes`` [>= N, >= K] (int8 or float8_e4m3fn) and fp32 ``scales`` [>= N, 1], one per output channel.

    In place, so captured CUDA graphs stay valid. ``weight`` [N, K]: types as in `quantize`; ``smoothing`` fp32 [K]
    divides it first. Code columns from K on become zero, rows from N on are unchanged.
    """
    weight = _with_adjacent_columns(weight)
    block = max(triton.next_power_of_2(codes.shape[1]), 16)
    if block > MAX_COLUMNS:
        raise ValueError(f"rows of {codes.shape[1]} codes do not fit in registers; use at most {MAX_COLUMNS}")
    rows_kernel[(weight.shape[0],)](
        weight, codes, scales, smoothing, weight.shape[1], codes.shape[1], weight.stride(0), codes.stride(0),
        BLOCK=block, num_warps=_warps_for_rows(weight.shape[0], block),
    )  # fmt: skip


def _warps_for_rows(rows: int, block: int) -> int:
    """Return the warps per program: more for few rows (H200, 32 rows of 3,584 columns: 4.5 to 2.4 us)."""
    if rows <= FEW_ROWS:
        return min(max(block // 128, 1), 32)
    return 32 if block == MAX_COLUMNS else min(max(block // 1024, 1), 16)


def requantize_blocks(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, whole: bool, power_of_two: bool
) -> None:
    """Write E4M3 ``codes`` [>= N, >= K] and fp32 ``scales`` per 128 x 128 tile (``whole``) or 1 x 128 segment.

    ``values``: types as in `quantize`; ``codes`` extend at most to the end of the last blocks, zero-padded. ``scales``
    [ceil(N / 128) or N, ceil(K / 128)] may have any strides. ``power_of_two`` rounds them up.
    """
    values = _with_adjacent_columns(values)
    block_rows = TILE if whole else _SEGMENT_ROWS
    blocks_kernel[(triton.cdiv(codes.shape[0], block_rows), triton.cdiv(codes.shape[1], TILE))](
        values, codes, scales, *values.shape, *codes.shape, values.stride(0), codes.stride(0), *scales.stride(),
        POWER_OF_TWO=power_of_two, WHOLE=whole, ROWS=block_rows, num_warps=8 if whole else 4,
    )  # fmt: skip


def _with_adjacent_columns(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(1) == 1 else values.contiguous()


class Tiles(NamedTuple):
    """Rows, columns and depth of a program's tile, and its launch parameters."""

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
"""By tokens per expert: a grouped product reads a whole weight for few of them. `int8_matmul` has more tokens."""
_MANY_TOKENS = Tiles(128, 128, 128, 8, 3)


def tiles_for(tokens: int) -> Tiles:
    """Return the tiles of a product with ``tokens`` rows."""
    return next((tiles for most, tiles in _TABLE if tokens <= most), _MANY_TOKENS)


def int8_matmul(
    codes: torch.Tensor, weight_codes: torch.Tensor, scales: torch.Tensor, weight_scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """Return ``dtype`` [M, N] ``(codes weight_codes^T) x scales x weight_scales^T``, one fp32 rounding per operation.

    int8 [M, K] and [N, K] of any row stride, contiguous along K; fp32 ``scales`` [M, 1], ``weight_scales`` [N, 1],
    contiguous. Pass slices to leave out padding rows of the weight.

    Raises:
        ValueError: K is above 133,144.
    """
    (rows, depth), columns = codes.shape, weight_codes.shape[0]
    if depth > MOST_SUMMED:
        raise ValueError(f"sums of {depth} products could overflow int32; use at most {MOST_SUMMED} columns")
    if rows <= MOST_TOKENS:
        return thin_product(codes, weight_codes, scales, weight_scales, dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
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
    """Multiply codes; one program per tile ROWS x COLUMNS of ``out``.

    STEPS is a constant, so each depth is compiled: Triton's interpreter does not support dynamic loop bounds.
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
    by_row = tl.load(scales + row, mask=real_row, other=0.0)[:, None]
    by_column = tl.load(weight_scales + column, mask=real_column, other=0.0)[None, :]
    scaled = result.to(tl.float32) * by_row * by_column
    place = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(place, scaled.to(out.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])


@triton.jit
def _tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Order programs by GROUP row tiles before the next column tile, so that weights are reused from the L2 cache."""
    in_group = GROUP * column_tiles
    first = (program // in_group) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + (program % in_group) % height, (program % in_group) // height
