"""The end of a kernel: a row goes out as numbers, or as the codes and scales that the next product wants."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.quantization import formats
from megatron_rl.quantization.kernels.quantize import LARGEST, codes_of, magnitude_bits, scale_of
from megatron_rl.quantization.recipe import PackedActivations, Packing

_TILE = tl.constexpr(formats.TILE)


class Sink:
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
def write_row(
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
