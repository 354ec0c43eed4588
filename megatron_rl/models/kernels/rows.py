"""Kernels of one program a row: residual + output and RMSNorm, or ``silu(gate) x up``.

The row goes out as numbers, or as the codes and scales that the next product wants.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.quantization import formats
from megatron_rl.quantization.kernels.quantize import codes_of, magnitude_bits, scale_of
from megatron_rl.quantization.recipe import PackedActivations, Packing

_TILE = tl.constexpr(formats.TILE)
_PIECE = 1024
"""Columns of a program where a row may be cut: a decode batch has too few rows to fill a GPU."""


def add_norm(
    residual: torch.Tensor,
    output: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    packing: Packing | None,
) -> tuple[torch.Tensor, torch.Tensor | PackedActivations]:
    """``output + bias + residual``, in the memory of ``output``, and ``rms_norm`` of it; [T, hidden] both.

    Without ``output`` the sum is ``residual`` itself. Rounded to the dtype where eager torch rounds: after each sum
    and after the norm, whose codes ``packing`` may ask for instead.
    """
    rows, columns = residual.shape
    written, sink = _sink(residual, columns, packing)
    block = max(triton.next_power_of_2(sink["out_columns"]), 128)
    add_norm_kernel[(rows,)](
        residual, output, bias, weight, columns, residual.stride(0), 0 if output is None else output.stride(0), epsilon,
        **sink, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return residual if output is None else output, written


def gate_up(inner: torch.Tensor, packing: Packing | None) -> torch.Tensor | PackedActivations:
    """``inner`` [T, 2 F], gates first -> [T, F], rounded to the dtype after silu and after the product."""
    rows, columns = inner.shape[0], inner.shape[1] // 2
    written, sink = _sink(inner, columns, packing)
    block = max(triton.next_power_of_2(sink["out_columns"]), 128)
    if packing is None or packing.in_segments:  # otherwise a program has to see a whole row
        block = min(block, _PIECE)
    gate_kernel[(rows, triton.cdiv(sink["out_columns"], block))](
        inner, columns, inner.stride(0), **sink, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return written


def _sink(
    like: torch.Tensor, columns: int, packing: Packing | None
) -> tuple[torch.Tensor | PackedActivations, dict[str, Any]]:
    """Room for [T, columns] numbers of the kind of ``like`` [T, ..], or for their codes; and what `_write_row` asks."""
    if packing is None:
        out = like.new_empty(like.shape[0], columns)
        return out, {
            "out": out, "scales": None, "out_columns": columns, "scale_stride": 0, "SEGMENTS": False,
            "POWER_OF_TWO": False,
        }  # fmt: skip
    packed = packing.allocate(like.shape[0], like.dtype, like.device)
    return packed, {
        "out": packed.codes, "scales": packed.scales, "out_columns": packing.columns,
        "scale_stride": packed.scales.stride(1), "SEGMENTS": packing.in_segments, "POWER_OF_TWO": packing.power_of_two,
    }  # fmt: skip


# The stride between columns of scales is the number of tokens: no compilation for each kind of number.
@triton.jit(do_not_specialize=["scale_stride"])
def add_norm_kernel(
    residual, output, bias, weight, columns, residual_stride, output_stride, epsilon,
    out, scales, out_columns, scale_stride, SEGMENTS: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    dtype = residual.dtype.element_ty
    x = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    if output is not None:
        place = output + row * output_stride + column
        added = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            added = added.to(dtype).to(tl.float32)
        x = (added + x).to(dtype)
        tl.store(place, x, mask=inside)
        x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / columns + epsilon)
    normed = x * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed.to(dtype).to(tl.float32)
    _write_row(normed, row, column, out, scales, out_columns, scale_stride, SEGMENTS, POWER_OF_TWO, BLOCK)


@triton.jit(do_not_specialize=["scale_stride"])
def gate_kernel(
    inner, columns, inner_stride,
    out, scales, out_columns, scale_stride, SEGMENTS: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, or a stretch of one."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dtype = inner.dtype.element_ty
    place = inner + row * inner_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    product = (opened * up).to(dtype).to(tl.float32)
    _write_row(product, row, column, out, scales, out_columns, scale_stride, SEGMENTS, POWER_OF_TWO, BLOCK)


@triton.jit
def _write_row(
    numbers, row, column, out, scales, out_columns, scale_stride,
    SEGMENTS: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``numbers`` [BLOCK] fp32 of ``row``, 0 beyond its end, at ``column``: a whole row, or whole segments of one.

    ``out`` [T, out_columns] is contiguous, scales lie column by column.
    """
    place = out + row * out_columns + column
    if scales is None:
        codes = numbers.to(out.dtype.element_ty)
    elif SEGMENTS:
        cut = tl.reshape(numbers, (BLOCK // _TILE, _TILE))
        scale = scale_of(tl.max(magnitude_bits(cut), 1), out.dtype.element_ty, POWER_OF_TWO)
        codes = tl.reshape(codes_of(cut, scale[:, None], out.dtype.element_ty), (BLOCK,))
        segment = tl.min(column, 0) // _TILE + tl.arange(0, BLOCK // _TILE)
        tl.store(scales + row + segment * scale_stride, scale, mask=segment * _TILE < out_columns)
    else:
        scale = scale_of(tl.max(magnitude_bits(numbers), 0), out.dtype.element_ty, False)
        codes = codes_of(numbers, scale, out.dtype.element_ty)
        tl.store(scales + row, scale)
    tl.store(place, codes, mask=column < out_columns)
