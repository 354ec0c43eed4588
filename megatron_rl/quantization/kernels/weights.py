"""Weights to codes and scales, in one pass, in buffers that keep their addresses.

A captured CUDA graph goes on reading the buffers, so nothing here allocates. A bf16 parameter moves three
bytes: two read, one written. The eager twin is `megatron_rl.quantization.formats`.
"""

from __future__ import annotations

import torch

from megatron_rl.quantization import formats
from megatron_rl.quantization.kernels.activations import INPUTS
from megatron_rl.quantization.kernels.quantize import LARGEST, launch_blocks, launch_rows


def requantize_rows(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    given_scales: torch.Tensor | None = None,
) -> None:
    """Write ``codes`` [>= N, >= K] (int8 or float8_e4m3fn) and fp32 ``scales`` [>= N, 1], one an output channel.

    ``weight`` [N, K] bf16, fp16 or fp32, K at most 65536. ``given_scales`` fp32 [N, 1] are taken as they are
    (their amax was shared over ranks) and copied into ``scales``. Code columns from K on become zeros, rows
    from N on stay. ValueError for other shapes and types.
    """
    _check_weight(weight, codes)
    rows = weight.shape[0]
    if codes.dtype not in LARGEST:
        raise ValueError(f"codes of {codes.dtype} are not known to the kernel; use int8 or float8_e4m3fn")
    _check_scales("scales", scales, (rows, 1), at_least=True)
    if given_scales is not None:
        _check_scales("given_scales", given_scales, (rows, 1))
    for name, tensor in (("scales", scales), ("given_scales", given_scales)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} of stride {tensor.stride()} are not adjacent; use a contiguous tensor")
    launch_rows(weight, codes, scales, given_scales=given_scales)


def requantize_tiles(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    given_scales: torch.Tensor | None = None,
    *,
    power_of_two: bool = False,
) -> None:
    """Write E4M3 ``codes`` [>= N, >= K] and fp32 ``scales`` [ceil(N / 128), ceil(K / 128)], one a 128 x 128 tile.

    ``weight`` [N, K] bf16, fp16 or fp32; ``codes`` reach at most to the end of the last tiles, where they
    become zeros. ``scales`` may be a view of any strides. ``power_of_two`` rounds them up; ``given_scales``
    fp32, of the same shape, are taken as they are. ValueError for other shapes and types.
    """
    _check_weight(weight, codes)
    tiles = tuple(-(-size // formats.TILE) for size in weight.shape)
    if codes.dtype != formats.FP8:
        raise ValueError(f"codes of {codes.dtype} have no tiles; use float8_e4m3fn")
    if tuple(-(-size // formats.TILE) for size in codes.shape) != tiles:
        raise ValueError(
            f"codes {list(codes.shape)} have other tiles than the weight {list(weight.shape)}; "
            f"use at most {[count * formats.TILE for count in tiles]}"
        )
    _check_scales("scales", scales, tiles)
    if given_scales is not None:
        _check_scales("given_scales", given_scales, tiles)
        if given_scales.stride(1) != 1:
            raise ValueError(f"given_scales of stride {given_scales.stride()} are not adjacent; use contiguous rows")
    launch_blocks(weight, codes, scales, whole=True, power_of_two=power_of_two, given_scales=given_scales)


def _check_weight(weight: torch.Tensor, codes: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in INPUTS:
        raise ValueError(
            f"the weight is {weight.dtype} {list(weight.shape)}, which the kernel does not read; "
            "use bfloat16, float16 or float32 [rows, columns]"
        )
    if codes.dim() != 2 or codes.shape[0] < weight.shape[0] or codes.shape[1] < weight.shape[1]:
        raise ValueError(
            f"codes {list(codes.shape)} cannot hold the weight {list(weight.shape)}; use at least {list(weight.shape)}"
        )
    if codes.stride(1) != 1:
        raise ValueError(f"codes of stride {codes.stride()} are not adjacent; use contiguous rows")


def _check_scales(name: str, scales: torch.Tensor, shape: tuple[int, ...], at_least: bool = False) -> None:
    rows = scales.shape[0] if scales.dim() else 0
    fits = scales.shape[1:] == shape[1:] and (rows == shape[0] or (at_least and rows > shape[0]))
    if not fits or scales.dtype != torch.float32:
        raise ValueError(f"{name} are {scales.dtype} {list(scales.shape)}; use float32 {list(shape)}")
