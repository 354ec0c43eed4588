"""Residual + output, RMSNorm, quantisation: one pass over [T, hidden]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.models.kernels.packing import Sink, write_row
from megatron_rl.quantization.recipe import PackedActivations, Packing


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
    sink = Sink(rows, columns, residual.dtype, residual.device, packing)
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
    write_row(
        normed, row, column, out, scales, out_stride, out_columns, scale_row_stride, scale_column_stride,
        LARGEST, INTEGER, SEGMENTS, POWER_OF_TWO, BLOCK,
    )  # fmt: skip
