"""Tokens to codes and scales, in one pass; the eager twin is `megatron_rl.quantization.formats`."""

from __future__ import annotations

import torch

from megatron_rl.quantization import formats
from megatron_rl.quantization.kernels.quantize import LARGEST, launch_blocks, launch_rows

INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def quantize_rows(
    values: torch.Tensor,
    code_type: torch.dtype,
    *,
    columns: int | None = None,
    smoothing: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, columns] of ``code_type`` (int8 or float8_e4m3fn), and fp32 scales [T, 1], one a token.

    ``values`` [T, K] bf16, fp16 or fp32, of any row stride; K at most 65536. ``columns`` (K if None) pads the
    codes with zeros to what a product wants. ``smoothing`` fp32 [K] divides the values first. ValueError for
    anything else.
    """
    _check_input(values)
    width = values.shape[1] if columns is None else columns
    if code_type not in LARGEST:
        raise ValueError(f"codes of {code_type} are not known to the kernel; use int8 or float8_e4m3fn")
    if width < values.shape[1]:
        raise ValueError(f"{width} columns of codes cannot hold {values.shape[1]} values a row; use at least as many")
    if smoothing is not None and (smoothing.shape != values.shape[1:] or smoothing.dtype != torch.float32):
        raise ValueError(
            f"smoothing is {smoothing.dtype} {list(smoothing.shape)} for {values.shape[1]} columns; "
            f"use float32 [{values.shape[1]}]"
        )
    codes = torch.empty(values.shape[0], width, dtype=code_type, device=values.device)
    scales = torch.empty(values.shape[0], 1, dtype=torch.float32, device=values.device)
    launch_rows(values, codes, scales, smoothing=None if smoothing is None else smoothing.contiguous())
    return codes, scales


def quantize_segments(values: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [T, S x 128] and fp32 scales [T, S], one a segment of 128 columns; S = ceil(K / 128).

    ``values`` [T, K] bf16, fp16 or fp32, of any row stride; ValueError for anything else. Columns of codes from
    K on are zeros. ``power_of_two`` rounds the scales up. The scales lie column by column (stride 1 along T),
    which is what cuBLAS takes without a copy.
    """
    _check_input(values)
    rows, count = values.shape[0], -(-values.shape[1] // formats.TILE)
    codes = torch.empty(rows, count * formats.TILE, dtype=formats.FP8, device=values.device)
    scales = torch.empty(count, rows, dtype=torch.float32, device=values.device).t()
    launch_blocks(values, codes, scales, whole=False, power_of_two=power_of_two)
    return codes, scales


def _check_input(values: torch.Tensor) -> None:
    if values.dim() != 2 or values.dtype not in INPUTS:
        raise ValueError(
            f"activations are {values.dtype} {list(values.shape)}, which the kernel does not read; "
            "use bfloat16, float16 or float32 [tokens, columns]"
        )
