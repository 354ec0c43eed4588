"""Matrix products of codes, by device. The only place that knows which kernel runs where.

CUDA has kernels for codes: Triton's, which torch's CUDA packages bring, and cuBLAS. A CPU without 8-bit dot products
multiplies the codes as fp32 numbers: integer sums below 2^24 are exact in fp32, so it gives the very accumulators of an
integer product.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as functional

from megatron_rl.quantization.recipe import QuantizedWeight

EXACT_COLUMNS = 1024
"""127 x 127 x 1040 is the last sum below 2^24."""
_TILE_TOKENS = 4
"""cuBLAS multiplies segments of a multiple of so many tokens."""


@functools.cache
def cpu_multiplies_int8() -> bool:
    """True where ``torch._int_mm`` has a kernel of its own; elsewhere it is 20 times slower than fp32."""
    return torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()


def needs_operand(device: torch.device, integer: bool) -> bool:
    """True if the device multiplies an fp32 copy instead of the codes."""
    return device.type == "cpu" and not (integer and cpu_multiplies_int8())


def int8_accumulate(codes: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
    """Exact integers ``codes W^T`` [T, N], int32, or fp32 where they fit; ``codes`` [T, K] are fp32 integers."""
    if q.operand is not None:
        return _exact_float_product(codes, q.operand)
    codes = functional.pad(codes.to(torch.int8), (0, q.codes.shape[1] - q.columns))
    if not codes.is_cuda:
        return torch._int_mm(codes, q.codes.t())[:, : q.rows]
    from megatron_rl.quantization.kernels.int8_matmul import int8_accumulators

    return int8_accumulators(codes, q.codes)[:, : q.rows]


def _exact_float_product(codes: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    if operand.shape[1] <= EXACT_COLUMNS:
        return torch.mm(codes, operand.t())
    pieces = zip(codes.split(EXACT_COLUMNS, 1), operand.split(EXACT_COLUMNS, 1), strict=True)
    return sum(torch.matmul(a, b.t()).to(torch.int32) for a, b in pieces)


def int8_product(codes: torch.Tensor, scales: torch.Tensor, q: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """CUDA: ``(codes x scales) W^T`` [T, N]; product, scales and cast in one kernel."""
    from megatron_rl.quantization.kernels.int8_matmul import int8_matmul

    return int8_matmul(codes, q.codes[: q.rows], scales, q.scales[: q.rows], dtype)


def fp8_row_product(codes: torch.Tensor, scales: torch.Tensor, q: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """CUDA: ``(codes x scales) W^T`` [T, N]; one scale a row of both."""
    out = torch.bfloat16  # the only one that rowwise scaling has
    product = torch._scaled_mm(codes, q.codes.t(), scale_a=scales, scale_b=q.scales.t(), out_dtype=out)
    return product[:, : q.rows].to(dtype)


def fp8_tile_product(
    codes: torch.Tensor, scales: torch.Tensor, q: QuantizedWeight, dtype: torch.dtype
) -> torch.Tensor:
    """CUDA, sm_90: 1 x 128 segments of activations against 128 x 128 tiles of the weight.

    cuBLAS wants the activations' scales column by column, with a multiple of four tokens a column, for which torch
    offers no padding of the scales alone; and the tiles' in columns padded to a multiple of four, which is how
    ``q.operand`` holds them.
    """
    kinds = functional.ScalingType
    tokens = codes.shape[0]
    missing = -tokens % _TILE_TOKENS
    if missing:
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        scales = functional.pad(scales.t(), (0, missing)).t()
    product = functional.scaled_mm(
        codes,
        q.codes.t(),
        scales.t().contiguous().t(),
        kinds.BlockWise1x128,
        q.operand.t(),
        kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product[:tokens, : q.rows].to(dtype)
