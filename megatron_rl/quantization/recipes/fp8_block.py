"""FP8 E4M3 with one scale per 128 x 128 tile of the weight and per 1 x 128 segment of activations.

The format of DeepSeek's checkpoints and, with power-of-two scales, of Transformer Engine's blockwise scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as functional

from megatron_rl.arithmetic import TILE
from megatron_rl.quantization import formats
from megatron_rl.quantization.recipe import PackedActivations, Packing, QuantizedWeight, Recipe


class Fp8Block(Recipe):
    """Scales are arbitrary fp32 numbers."""

    name = "fp8_block"
    format = "fp8 e4m3, 128x128 x 1x128"
    tile = (128, 128)
    powers_of_two: ClassVar[bool] = False

    def device_problem(self, capability: tuple[int, int] | None) -> str | None:
        """Require blockwise products, which exist only for Hopper."""
        if capability is None or capability[0] == 9:
            return None
        own = "{}.{}".format(*capability)
        return f"{self.name} needs a GPU of compute capability 9 (Hopper) and this one is {own}; use fp8 or int8"

    def allocate(self, shape: Sequence[int], device: torch.device) -> QuantizedWeight:
        *stack, rows, columns = shape
        stored = self.stored_shape(rows, columns)
        tiles = stored[0] // TILE, stored[1] // TILE
        codes = torch.zeros(*stack, *stored, dtype=formats.FP8, device=device)
        if device.type == "cuda":  # one buffer for both: cuBLAS wants the columns of scales padded to four
            operand = torch.zeros(*stack, tiles[0], -(-tiles[1] // 4) * 4, device=device)
            return QuantizedWeight(codes, operand[..., : tiles[1]], rows, columns, operand=operand)
        operand = torch.zeros(*shape, device=device)
        return QuantizedWeight(codes, torch.ones(*stack, *tiles, device=device), rows, columns, operand=operand)

    def encode(self, weight: torch.Tensor, into: QuantizedWeight) -> None:
        if weight.is_cuda:
            from megatron_rl.quantization.kernels import requantize_blocks

            requantize_blocks(weight, into.codes, into.scales, whole=True, power_of_two=self.powers_of_two)
            return
        cut = formats.tiles(weight.float())
        scale = self._scale(cut.abs().amax((1, 3), keepdim=True))
        # Rounded before the cast: a CPU casts to fp8 element by element, and the operand needs the numbers.
        codes = formats.fp8_rounded((cut / scale).clamp_(-formats.FP8_MAX, formats.FP8_MAX))
        into.codes.copy_(codes.reshape(into.codes.shape))
        into.scales.copy_(scale.view(into.scales.shape))
        into.operand.copy_((codes * scale).reshape(into.codes.shape)[: into.rows, : into.columns])

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        scale = formats.scale_of(amax, formats.FP8_MAX)
        return formats.power_of_two(scale) if self.powers_of_two else scale

    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        weight = formats.tiles(q.codes.float()) * q.scales[:, None, :, None]
        return weight.reshape(q.codes.shape)[: q.rows, : q.columns]

    def matmul(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        tokens = x.reshape(-1, q.columns)
        if x.is_cuda:
            from megatron_rl.quantization.kernels import quantize

            product = self.multiply(quantize(tokens, self.packing(q)), q)
        else:
            product = torch.mm(self.round_trip(tokens.float(), q), q.operand.t()).to(x.dtype)
        return product.view(*x.shape[:-1], q.rows)

    def packing(self, q: QuantizedWeight) -> Packing | None:
        return Packing(formats.FP8, q.codes.shape[1], in_segments=True, power_of_two=self.powers_of_two)

    def multiply(self, x: PackedActivations, q: QuantizedWeight) -> torch.Tensor:
        from megatron_rl.quantization.thin_kernels import MOST_TOKENS, thin_product

        if len(x.codes) <= MOST_TOKENS:
            return thin_product(x.codes, q.codes[: q.rows], x.scales, q.scales, x.dtype, tiled=True)
        return fp8_product(x.codes, x.scales, q, x.dtype)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Multiply with the transposed tiles of ``q``: 1 x 128 segments of the gradient against 128 x 128 tiles."""
        if not gradient.is_cuda:
            return torch.mm(self.round_trip_of(gradient.float()), q.operand).to(gradient.dtype)
        transposed = self.allocate((q.columns, q.rows), gradient.device)
        transposed.codes.copy_(q.codes.t())
        transposed.scales.copy_(q.scales.t())
        return self.matmul(gradient, transposed)

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Multiply in segments of 128 tokens per channel, because the sum is over tokens."""
        if not gradient.is_cuda:
            dy, seen = (self.round_trip_of(each.t().float()) for each in (gradient, x))
            return torch.mm(dy, seen.t()).to(gradient.dtype)
        packed = [pack_segments(each.t(), self.powers_of_two) for each in (gradient, x)]
        return segments_product(*packed, gradient.dtype)[: gradient.shape[1], : x.shape[1]]

    def activation_codes(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of ``tokens`` [T, K] as fp32 numbers [T, S, 128], and their scales [T, S, 1]; eager."""
        cut = formats.segments(tokens.float())
        scale = self._scale(formats.row_amax(cut))
        return formats.fp8_rounded(cut / scale), scale  # past the limit by an ulp at most: rounding takes it back

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        return self.round_trip_of(x.reshape(-1, q.columns)).view(x.shape)

    def round_trip_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Quantise and dequantise ``tokens`` [T, K] in segments of 128 columns."""
        codes, scale = self.activation_codes(tokens)
        return (codes * scale).flatten(1)[:, : tokens.shape[1]].to(tokens.dtype)


def fp8_product(codes: torch.Tensor, scales: torch.Tensor, q: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Multiply on CUDA, sm_90: 1 x 128 segments of activations against 128 x 128 tiles of the weight.

    cuBLAS needs column-major activation scales for a multiple of four tokens (torch cannot pad the scales alone), and
    tile scales in columns padded to a multiple of four, as in ``q.operand``.
    """
    kinds, tokens = functional.ScalingType, codes.shape[0]
    missing = -tokens % 4
    if missing:
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        scales = functional.pad(scales.t(), (0, missing)).t()
    product = functional.scaled_mm(
        codes, q.codes.t(), scales.t().contiguous().t(), kinds.BlockWise1x128, q.operand.t(), kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return product[:tokens, : q.rows].to(dtype)


def pack_segments(values: torch.Tensor, power_of_two: bool) -> PackedActivations:
    """Pack ``values`` [R, T] on CUDA in 1 x 128 segments; rows are padded to 16 for cuBLAS (codes 0, scales undefined).
    """
    from megatron_rl.quantization.kernels import requantize_blocks

    rows, columns = values.shape
    packing = Packing(formats.FP8, -(-columns // TILE) * TILE, in_segments=True)
    packed = packing.allocate(-(-rows // 16) * 16, values.dtype, values.device)
    requantize_blocks(values, packed.codes, packed.scales, whole=False, power_of_two=power_of_two)
    return packed


def segments_product(a: PackedActivations, b: PackedActivations, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``a b^T`` on CUDA, sm_90, both in 1 x 128 segments with column-major scales."""
    kind = functional.ScalingType.BlockWise1x128
    product = functional.scaled_mm(a.codes, b.codes.t(), a.scales, kind, b.scales, kind, output_dtype=torch.bfloat16)
    return product.to(dtype)


RECIPE = Fp8Block()
