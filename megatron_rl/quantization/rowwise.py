"""Recipes with one scale per row: per output channel of the weight, per token of the activations.

The scale of a row can be taken out of the sum: ``sum(a s_a w s_w) = s_a s_w sum(a w)``. CUDA multiplies codes. A CPU
without 8-bit dot products multiplies them as fp32 numbers: integer sums below 2^24 are exact in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as functional

from megatron_rl.quantization import formats
from megatron_rl.quantization.recipe import PackedActivations, Packing, QuantizedWeight, Recipe

EXACT_COLUMNS = 1024
"""127 x 127 x 1040 is the last sum below 2^24."""


@functools.cache
def cpu_multiplies_int8() -> bool:
    """Return whether ``torch._int_mm`` has a fast kernel; without one it is 20 times slower than fp32."""
    return torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()


class RowRecipe(Recipe):
    """The base of fp8, fp8_tensor, int8 and int8_smooth."""

    largest: ClassVar[float]
    code_type: ClassVar[torch.dtype]
    one_pass: ClassVar[bool] = True
    """False if a row's scale depends on other rows, or the kernel has another largest code."""

    @property
    def _integer(self) -> bool:
        return self.code_type == torch.int8

    def amax(self, weight: torch.Tensor) -> torch.Tensor:
        """Return fp32 [N, 1]: the largest magnitude among the numbers that share a row's scale."""
        return formats.row_amax(weight)

    def allocate(self, shape: Sequence[int], device: torch.device) -> QuantizedWeight:
        *stack, rows, columns = shape
        stored = *stack, *self.stored_shape(rows, columns)
        codes = torch.zeros(stored, dtype=self.code_type, device=device)
        q = QuantizedWeight(codes, torch.ones(*stored[:-1], 1, device=device), rows, columns)
        # Stacks too: CPUs have no grouped product of integers.
        if device.type == "cpu" and (stack or not (self._integer and cpu_multiplies_int8())):
            q.operand = torch.zeros(*shape, device=device)
        if self.needs_calibration:
            q.smoothing = torch.ones(*stack, columns, device=device)
        return q

    def encode(self, weight: torch.Tensor, into: QuantizedWeight) -> None:
        if weight.is_cuda and into.smoothing is None and self.one_pass:
            from megatron_rl.quantization.kernels import requantize_rows

            requantize_rows(weight, into.codes, into.scales)
            return
        weight = weight.float()
        if into.smoothing is not None:
            weight = weight * into.smoothing
        scale = formats.scale_of(self.amax(weight), self.largest)
        if self._integer:
            codes = formats.integer_codes(weight, scale, self.largest)
        else:  # rounded before the cast: a CPU converts fp8 element by element, and the operand wants the numbers
            codes = formats.fp8_rounded((weight / scale).clamp_(-self.largest, self.largest))
        into.codes[: into.rows, : into.columns] = codes
        into.scales[: into.rows] = scale
        if into.operand is not None:
            into.operand.copy_(codes)

    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        weight = q.codes[: q.rows, : q.columns].float() * q.scales[: q.rows]
        return weight if q.smoothing is None else weight / q.smoothing

    def matmul(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        tokens = x.reshape(-1, q.columns)
        if x.is_cuda:
            from megatron_rl.quantization.kernels import quantize

            product = self.multiply(quantize(tokens, self.packing(q)), q)
        else:
            codes, scale = self.activation_codes(tokens, q)
            sums = int8_accumulate(codes, q) if self._integer else torch.mm(codes, q.operand.t())
            product = sums.float().mul_(scale).mul_(q.scales[: q.rows].t()).to(x.dtype)
        return product.view(*x.shape[:-1], q.rows)

    def grouped_matmul(self, x: torch.Tensor, q: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
        """Multiply group by group, without reading group sizes on the host, for CUDA graphs."""
        if x.is_cuda:
            return self.grouped_by_kernel(x, q, ends)
        expert = _expert_of_each(x, ends)
        smoothing = None if q.smoothing is None else q.smoothing[expert]
        codes, scale = self.activation_codes(x, replace(q, smoothing=smoothing))
        longest = EXACT_COLUMNS if self._integer else q.columns
        pieces = zip(codes.split(longest, 1), q.operand.split(longest, 2), strict=True)
        products = [functional.grouped_mm(a, b.transpose(1, 2), offs=ends) for a, b in pieces]
        product = products[0] if len(products) == 1 else sum(part.to(torch.int32) for part in products).float()
        return product.mul_(scale).mul_(q.scales[expert, : q.rows, 0]).to(x.dtype)

    def grouped_by_kernel(self, x: torch.Tensor, q: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
        """Return `grouped_matmul` on CUDA, or in Triton's interpreter."""
        from megatron_rl.quantization.kernels import quantize

        # Smoothing differs by expert, and the quantisation kernel takes only one for all rows.
        values = x if q.smoothing is None else x.float() / q.smoothing[_expert_of_each(x, ends)]
        packed = quantize(values, Packing(self.code_type, q.codes.shape[-1]))
        return self.grouped_multiply(replace(packed, dtype=x.dtype), q, ends)

    def grouped_packing(self, q: QuantizedWeight) -> Packing | None:
        """Return None with smoothing, which the kernels do not support per expert."""
        return None if q.smoothing is not None else Packing(self.code_type, q.codes.shape[-1])

    def grouped_multiply(self, x: PackedActivations, q: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
        from megatron_rl.quantization.grouped_kernels import grouped_product

        codes = x.codes
        if not self._integer and codes.is_cuda and torch.cuda.get_device_capability(codes.device) in ((9, 0), (10, 0)):
            product = torch._scaled_grouped_mm(  # faster, and for these two alone
                codes, q.codes.transpose(1, 2), x.scales[:, 0], q.scales[..., 0], offs=ends, out_dtype=torch.bfloat16
            )
            return product[:, : q.rows].to(x.dtype)
        return grouped_product(codes, q.codes[:, : q.rows], x.scales, q.scales, ends, x.dtype)

    def packing(self, q: QuantizedWeight) -> Packing | None:
        return Packing(self.code_type, q.codes.shape[1], smoothing=q.smoothing)

    def multiply(self, x: PackedActivations, q: QuantizedWeight) -> torch.Tensor:
        if not self._integer:
            return fp8_product(x.codes, x.scales, q, x.dtype)
        from megatron_rl.quantization.kernels import int8_matmul

        return int8_matmul(x.codes, q.codes[: q.rows], x.scales, q.scales[: q.rows], x.dtype)

    def activation_codes(self, tokens: torch.Tensor, q: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of ``tokens`` [T, K] as fp32 numbers [T, K], and their scales [T, 1]; eager."""
        values = tokens.float()
        if q.smoothing is not None:
            values = values / q.smoothing
        scale = formats.scale_of(formats.row_amax(values), self.largest)
        # No clamp: the quotient exceeds the limit by at most an ulp, which rounding removes.
        scaled = values / scale
        return (scaled.round_() if self._integer else formats.fp8_rounded(scaled)), scale

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        codes, scale = self.activation_codes(x.reshape(-1, q.columns), q)
        values = codes * scale
        if q.smoothing is not None:
            values = values * q.smoothing
        return values.to(x.dtype).view(x.shape)


def _expert_of_each(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the expert [T] of tokens sorted by expert; after the last end the last expert."""
    places = torch.arange(x.shape[0], dtype=ends.dtype, device=x.device)
    return torch.searchsorted(ends, places, right=True).clamp_max_(len(ends) - 1)


def int8_accumulate(codes: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
    """Compute ``codes W^T`` [T, N] exactly on a CPU, as int32, or fp32 where it fits; ``codes`` [T, K] fp32."""
    if q.operand is not None:
        if q.columns <= EXACT_COLUMNS:
            return torch.mm(codes, q.operand.t())
        pieces = zip(codes.split(EXACT_COLUMNS, 1), q.operand.split(EXACT_COLUMNS, 1), strict=True)
        return sum(torch.matmul(a, b.t()).to(torch.int32) for a, b in pieces)
    codes = functional.pad(codes.to(torch.int8), (0, q.codes.shape[1] - q.columns))
    return torch._int_mm(codes, q.codes.t())[:, : q.rows]


def fp8_product(codes: torch.Tensor, scales: torch.Tensor, q: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``(codes x scales) W^T`` [T, N] on CUDA; one scale per row of both."""
    from megatron_rl.quantization.thin_kernels import MOST_TOKENS, thin_product

    if len(codes) <= MOST_TOKENS:
        return thin_product(codes, q.codes[: q.rows], scales, q.scales[: q.rows], dtype)
    out = torch.bfloat16  # the only one that rowwise scaling has
    product = torch._scaled_mm(codes, q.codes.t(), scale_a=scales, scale_b=q.scales.t(), out_dtype=out)
    return product[:, : q.rows].to(dtype)
