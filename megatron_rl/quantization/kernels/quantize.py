"""The kernels that turn numbers into codes, and their launches: a program a row, or a block of 128 columns.

Memory-bound, so each number is read once and stays in registers between its group's maximum and its code. All
arithmetic is that of `formats`, in fp32: a division is `tl.div_rn`, because Triton's ``/`` is approximate on a
GPU; maxima are taken of the bit patterns, which for magnitudes order like the numbers and let a NaN through to
the scale, as torch's ``amax`` does and Triton's ``max`` does not.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from megatron_rl.quantization import formats

MAX_COLUMNS = 65536
"""A row is held in the registers of one program; more would spill."""
_SEGMENT_ROWS = 16
LARGEST = {torch.int8: formats.INT8_MAX, formats.FP8: formats.FP8_MAX}


def _bits_of(number: float) -> int:
    return struct.unpack("<i", struct.pack("<f", number))[0]


_TILE = tl.constexpr(formats.TILE)
_FLOOR_BITS = tl.constexpr(_bits_of(formats.AMAX_FLOOR))
_INTEGER_MAGIC = tl.constexpr(1.5 * 2**23)
"""From 2^23 to 2^24 fp32 holds the integers: adding this rounds a small number to the nearest even one."""
_INTEGER_MAGIC_BITS = tl.constexpr(_bits_of(1.5 * 2**23))
_E4M3_MAGIC = tl.constexpr(1.5 * 2**20)
"""Times a number's own power of two: adding this leaves three bits behind the leading one."""
_E4M3_SMALLEST_NORMAL_BITS = tl.constexpr(_bits_of(2.0**-6))
_EXPONENT_BITS = tl.constexpr(0x7F800000)
_MANTISSA_BITS = tl.constexpr(0x7FFFFF)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitude_bits(values):
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS


@triton.jit
def scale_of(amax_bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`formats.scale_of`, then perhaps `formats.power_of_two`."""
    scale = tl.div_rn(tl.maximum(amax_bits, _FLOOR_BITS).to(tl.float32, bitcast=True), LARGEST)
    if POWER_OF_TWO:
        raised = (scale.to(tl.int32, bitcast=True) + _MANTISSA_BITS) & _EXPONENT_BITS
        scale = raised.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def e4m3_of(scaled):
    """E4M3 of fp32 numbers within +-448, to nearest even.

    The number is exact before its cast: Triton's interpreter truncates in casts, and its rounding mode "rtne" loses
    the carry into the exponent.
    """
    exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) & _EXPONENT_BITS, _E4M3_SMALLEST_NORMAL_BITS)
    magic = exponent.to(tl.float32, bitcast=True) * _E4M3_MAGIC
    return ((scaled + magic) - magic).to(tl.float8e4nv)


@triton.jit
def codes_of(values, scale, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """`formats.integer_codes` or `formats.fp8_codes`.

    Both round by arithmetic of their own. The integer is read off the sum's bits, so that no optimisation can
    cancel the magic number.
    """
    scaled = tl.minimum(tl.maximum(tl.div_rn(values, scale), -LARGEST), LARGEST)
    if INTEGER:
        codes = ((scaled + _INTEGER_MAGIC).to(tl.int32, bitcast=True) - _INTEGER_MAGIC_BITS).to(tl.int8)
    else:
        codes = e4m3_of(scaled)
    return codes


@triton.jit
def rows_kernel(
    values,
    codes,
    scales,
    given_scales,
    smoothing,
    columns,
    code_columns,
    value_stride,
    code_stride,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(values + row * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    if smoothing is not None:
        x = tl.div_rn(x, tl.load(smoothing + column, mask=inside, other=1.0))
    if given_scales is not None:
        scale = tl.load(given_scales + row)
    else:
        scale = scale_of(tl.max(magnitude_bits(x), 0), LARGEST, False)
    tl.store(scales + row, scale)
    tl.store(codes + row * code_stride + column, codes_of(x, scale, LARGEST, INTEGER), mask=column < code_columns)


# Strides of scales go with the number of tokens: kernels of their own for 1 and for multiples of 16 would be compiled
# in the middle of a run.
@triton.jit(
    do_not_specialize=["rows", "code_rows", "scale_row_stride", "scale_column_stride", "given_row_stride"]
)
def blocks_kernel(
    values,
    codes,
    scales,
    given_scales,
    rows,
    columns,
    code_rows,
    code_columns,
    value_stride,
    code_stride,
    scale_row_stride,
    scale_column_stride,
    given_row_stride,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a block of ROWS x 128, with one scale if WHOLE, else a scale a row. E4M3 only."""
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
    if given_scales is not None:
        scale = tl.load(given_scales + group * given_row_stride + tile, mask=real, other=1.0)
    else:
        scale = scale_of(amax_bits, LARGEST, POWER_OF_TWO)
    tl.store(scales + group * scale_row_stride + tile * scale_column_stride, scale, mask=real)
    written = (row < code_rows) & (column < code_columns)
    tl.store(codes + row * code_stride + column, codes_of(x, scale, LARGEST, False), mask=written)


def launch_rows(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    given_scales: torch.Tensor | None = None,
    smoothing: torch.Tensor | None = None,
) -> None:
    """Codes of ``values`` [R, K] into ``codes`` [>= R, >= K] and their scales into ``scales`` [>= R, 1].

    Code columns from K on become zeros. Rows from R on stay as they are.
    """
    rows, columns = values.shape
    values = _with_adjacent_columns(values)
    block = max(triton.next_power_of_2(codes.shape[1]), 16)
    if block > MAX_COLUMNS:
        raise ValueError(f"rows of {codes.shape[1]} codes do not fit in registers; use at most {MAX_COLUMNS}")
    if rows == 0 or codes.shape[1] == 0:
        return
    rows_kernel[(rows,)](
        values,
        codes,
        scales,
        given_scales,
        smoothing,
        columns,
        codes.shape[1],
        values.stride(0),
        codes.stride(0),
        LARGEST=LARGEST[codes.dtype],
        INTEGER=codes.dtype == torch.int8,
        BLOCK=block,
        num_warps=32 if block == MAX_COLUMNS else min(max(block // 1024, 1), 16),
    )


def launch_blocks(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    whole: bool,
    power_of_two: bool,
    given_scales: torch.Tensor | None = None,
) -> None:
    """E4M3 codes of ``values`` [R, K] into ``codes`` [>= R, >= K], scales a segment or, if ``whole``, a tile.

    Codes from K on, and from R on to the end of the last tile, become zeros.
    """
    values = _with_adjacent_columns(values)
    block_rows = formats.TILE if whole else _SEGMENT_ROWS
    grid = triton.cdiv(codes.shape[0], block_rows), triton.cdiv(codes.shape[1], formats.TILE)
    if 0 in grid:
        return
    blocks_kernel[grid](
        values,
        codes,
        scales,
        given_scales,
        *values.shape,
        *codes.shape,
        values.stride(0),
        codes.stride(0),
        *scales.stride(),
        0 if given_scales is None else given_scales.stride(0),
        LARGEST=formats.FP8_MAX,
        POWER_OF_TWO=power_of_two,
        WHOLE=whole,
        ROWS=block_rows,
        num_warps=8 if whole else 4,
    )


def _with_adjacent_columns(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(1) == 1 else values.contiguous()
