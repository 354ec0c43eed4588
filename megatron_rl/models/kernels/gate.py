"""``silu(gate) x up`` and its quantisation: one pass over [T, 2 F]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.models.kernels.packing import Sink, write_row
from megatron_rl.quantization.recipe import PackedActivations, Packing

_PIECE = 1024
"""Columns of a program where a row may be cut: a decode batch has too few rows to fill a GPU."""


def gate_up(inner: torch.Tensor, packing: Packing | None) -> torch.Tensor | PackedActivations:
    """``inner`` [T, 2 F], gates first -> [T, F], rounded to the dtype after silu and after the product."""
    rows, columns = inner.shape[0], inner.shape[1] // 2
    sink = Sink(rows, columns, inner.dtype, inner.device, packing)
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
    write_row(
        product, row, column, out, scales, out_stride, out_columns, scale_row_stride, scale_column_stride,
        LARGEST, INTEGER, SEGMENTS, POWER_OF_TWO, BLOCK,
    )  # fmt: skip
