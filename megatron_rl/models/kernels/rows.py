"""Kernels of one program a row: residual + output and RMSNorm, or ``silu(gate) x up``.

The row goes out as numbers, or as the codes and scales that the next product wants.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.quantization import formats
from megatron_rl.quantization.kernels.quantize import LARGEST, codes_of, magnitude_bits, scale_of
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
    sink = _Sink(rows, columns, residual.dtype, residual.device, packing)
    block = max(triton.next_power_of_2(sink.columns), 128)
    if rows:
        add_norm_kernel[(rows,)](
            residual,
            output,
            bias,
            weight,
            columns,
            residual.stride(0),
            0 if output is None else output.stride(0),
            epsilon,
            **sink.arguments,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return residual if output is None else output, sink.written


# The stride between columns of scales is the number of tokens: no compilation for each kind of number.
@triton.jit(do_not_specialize=["scale_row_stride", "scale_column_stride"])
def add_norm_kernel(
    residual,
    output,
    bias,
    weight,
    columns,
    residual_stride,
    output_stride,
    epsilon,
    out,
    scales,
    out_stride,
    out_columns,
    scale_row_stride,
    scale_column_stride,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    _write_row(
        normed, row, column, out, scales, out_stride, out_columns, scale_row_stride, scale_column_stride,
        LARGEST, INTEGER, SEGMENTS, POWER_OF_TWO, BLOCK,
    )  # fmt: skip


def gate_up(inner: torch.Tensor, packing: Packing | None) -> torch.Tensor | PackedActivations:
    """``inner`` [T, 2 F], gates first -> [T, F], rounded to the dtype after silu and after the product."""
    rows, columns = inner.shape[0], inner.shape[1] // 2
    sink = _Sink(rows, columns, inner.dtype, inner.device, packing)
    whole = max(triton.next_power_of_2(sink.columns), 128)
    block = whole if sink.needs_row else min(whole, _PIECE)
    if rows:
        gate_kernel[(rows, triton.cdiv(sink.columns, block))](
            inner,
            columns,
            inner.stride(0),
            **sink.arguments,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return sink.written


# The stride between columns of scales is the number of tokens: no compilation for each kind of number.
@triton.jit(do_not_specialize=["scale_row_stride", "scale_column_stride"])
def gate_kernel(
    inner,
    columns,
    inner_stride,
    out,
    scales,
    out_stride,
    out_columns,
    scale_row_stride,
    scale_column_stride,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    _write_row(
        product, row, column, out, scales, out_stride, out_columns, scale_row_stride, scale_column_stride,
        LARGEST, INTEGER, SEGMENTS, POWER_OF_TWO, BLOCK,
    )  # fmt: skip


class _Sink:
    """Where a kernel writes [T, K] numbers: a tensor of their dtype, or codes and scales as ``packing`` says."""

    def __init__(self, tokens: int, columns: int, dtype: torch.dtype, device: torch.device, packing: Packing | None):
        self._dtype = dtype
        if packing is None:
            self._out, self._scales = torch.empty(tokens, columns, dtype=dtype, device=device), None
        else:
            self._out, self._scales = packing.allocate(tokens, device)
        self.columns = self._out.shape[1]
        """Of what is written, its padding included."""
        in_segments = packing is not None and packing.in_segments
        self.needs_row = packing is not None and not packing.in_segments
        """One program has to see a whole row."""
        self.arguments: dict[str, Any] = {
            "out": self._out,
            "scales": self._scales,
            "out_stride": self._out.stride(0),
            "out_columns": self.columns,
            "scale_row_stride": 0 if self._scales is None else self._scales.stride(0),
            "scale_column_stride": 0 if self._scales is None else self._scales.stride(1),
            "LARGEST": 0.0 if packing is None else LARGEST[packing.code_type],
            "INTEGER": packing is not None and packing.code_type == torch.int8,
            "SEGMENTS": in_segments,
            "POWER_OF_TWO": packing is not None and packing.power_of_two,
        }

    @property
    def written(self) -> torch.Tensor | PackedActivations:
        """After the launch."""
        return self._out if self._scales is None else PackedActivations(self._out, self._scales, self._dtype)


@triton.jit
def _write_row(
    numbers,
    row,
    column,
    out,
    scales,
    out_stride,
    out_columns,
    scale_row_stride,
    scale_column_stride,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``numbers`` [BLOCK] fp32 of ``row``, 0 beyond its end, at ``column``: a whole row, or whole segments of one."""
    place = out + row * out_stride + column
    if scales is None:
        tl.store(place, numbers.to(out.dtype.element_ty), mask=column < out_columns)
    elif SEGMENTS:
        cut = tl.reshape(numbers, (BLOCK // _TILE, _TILE))
        scale = scale_of(tl.max(magnitude_bits(cut), 1), LARGEST, POWER_OF_TWO)
        codes = tl.reshape(codes_of(cut, scale[:, None], LARGEST, INTEGER), (BLOCK,))
        segment = tl.min(column, 0) // _TILE + tl.arange(0, BLOCK // _TILE)
        scale_place = scales + row * scale_row_stride + segment * scale_column_stride
        tl.store(scale_place, scale, mask=segment * _TILE < out_columns)
        tl.store(place, codes, mask=column < out_columns)
    else:
        scale = scale_of(tl.max(magnitude_bits(numbers), 0), LARGEST, False)
        tl.store(scales + row, scale)
        tl.store(place, codes_of(numbers, scale, LARGEST, INTEGER), mask=column < out_columns)
