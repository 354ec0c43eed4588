"""Recipes with one scale a row: an output channel of the weight, a token of the activations.

Along a row all numbers have the same scale, so it comes out of the sum: ``sum(a s_a w s_w) = s_a s_w sum(a w)``.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_rl.quantization import formats, kernels, products
from megatron_rl.quantization.recipe import PackedActivations, Packing, QuantizedWeight, Ranks, Recipe, Split
from megatron_rl.quantization.storage import stored_shape


class RowRecipe(Recipe):
    """What fp8, fp8_tensor, int8 and int8_smooth have in common."""

    largest: ClassVar[float]
    code_type: ClassVar[torch.dtype]

    @property
    def _integer(self) -> bool:
        return self.code_type == torch.int8

    # -- the weight ----------------------------------------------------------------------------

    def shares_amax(self, split: Split) -> bool:
        """A channel's inputs are spread over the ranks where the rows are split."""
        return split == "rows"

    def amax(self, weight: torch.Tensor, smoothing: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [N, 1]."""
        return formats.row_amax(weight if smoothing is None else weight * smoothing)

    def allocate(self, rows: int, columns: int, device: torch.device) -> QuantizedWeight:
        """See `Recipe.allocate`."""
        stored = stored_shape(self.name, rows, columns)
        q = QuantizedWeight(
            codes=torch.zeros(stored, dtype=self.code_type, device=device),
            scales=torch.ones(stored[0], 1, device=device),
            rows=rows,
            columns=columns,
        )
        if products.needs_operand(device, self._integer):
            q.operand = torch.zeros(rows, columns, device=device)
        if self.needs_calibration:
            q.smoothing = torch.ones(columns, device=device)
        return q

    def encode(self, weight: torch.Tensor, amax: torch.Tensor | None, into: QuantizedWeight) -> None:
        """See `Recipe.encode`."""
        if into.smoothing is None and weight.is_cuda and kernels.available():
            from megatron_rl.quantization.kernels.weights import requantize_rows

            scales = None if amax is None else formats.scale_of(amax, self.largest)
            if self._one_pass:
                requantize_rows(weight, into.codes, into.scales, given_scales=scales)
                return
        weight = weight.float()
        if into.smoothing is not None:
            weight = weight * into.smoothing
        scale = formats.scale_of(self.amax(weight) if amax is None else amax, self.largest)
        if self._integer or into.operand is None:
            codes = self._codes(weight, scale)
        else:  # rounded first: a CPU converts fp8 element by element, and the operand wants the numbers
            codes = formats.fp8_rounded((weight / scale).clamp_(-self.largest, self.largest))
        into.codes[: into.rows, : into.columns] = codes
        into.scales[: into.rows] = scale
        if into.operand is not None:
            into.operand.copy_(codes)

    _one_pass: ClassVar[bool] = True
    """False where a row's scale needs more than the row."""

    def _codes(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self._integer:
            return formats.integer_codes(values, scale, self.largest)
        return formats.fp8_codes(values, scale)

    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.dequantize`."""
        weight = q.codes[: q.rows, : q.columns].float() * q.scales[: q.rows]
        return weight if q.smoothing is None else weight / q.smoothing

    # -- the product ---------------------------------------------------------------------------

    def matmul(
        self,
        x: torch.Tensor,
        q: QuantizedWeight,
        bias: torch.Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> torch.Tensor:
        """See `Recipe.matmul`."""
        tokens = x.reshape(-1, q.columns)
        if x.is_cuda and ranks is None and kernels.available():
            codes, scale = self._packed_activations(tokens, q, None)
            product = self._whole_product(codes, scale, q, bias, x.dtype)
        else:
            product = self._on_cuda(tokens, q, ranks) if x.is_cuda else self._on_cpu(tokens, q, ranks)
            product = (product if bias is None else product + bias).to(x.dtype)
        return product.view(*x.shape[:-1], q.rows)

    def packing(self, q: QuantizedWeight, ranks: Ranks | None) -> Packing | None:
        """See `Recipe.packing`. Scales that ranks share, and smoothing, are not the kernels'."""
        if ranks is not None or q.smoothing is not None:
            return None
        return Packing(self.code_type, q.codes.shape[1])

    def multiply(self, x: PackedActivations, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.multiply`."""
        return self._whole_product(x.codes, x.scales, q, None, x.dtype)

    def _whole_product(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        q: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """On CUDA, of a weight that no other rank has a part of the sum of; no cast where ``dtype`` is bf16."""
        if self._integer:
            return products.int8_linear(codes, scale, q, bias, dtype)
        if bias is None:
            return products.fp8_row_product(codes, scale, q, dtype)
        return (products.fp8_row_product(codes, scale, q, torch.float32) + bias).to(dtype)

    def _on_cpu(self, tokens: torch.Tensor, q: QuantizedWeight, ranks: Ranks | None) -> torch.Tensor:
        codes, scale = self._activation_codes(tokens, q, ranks)
        if self._integer:
            if q.operand is None:
                codes = torch.nn.functional.pad(codes.to(torch.int8), (0, q.codes.shape[1] - q.columns))
            accumulated = products.int8_accumulate(codes, q)
            if ranks is not None:  # whole numbers: the sum is the one rank's to the bit
                accumulated = ranks.total(accumulated.to(torch.int32))
        else:
            accumulated = torch.mm(codes, q.operand.t())
            if ranks is not None:
                accumulated = ranks.total(accumulated)
        return accumulated.float().mul_(scale).mul_(q.scales[: q.rows].t())

    def _activation_codes(
        self, tokens: torch.Tensor, q: QuantizedWeight, ranks: Ranks | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes as fp32 numbers [T, K], and their scales [T, 1]; eager."""
        values = tokens.float()
        if q.smoothing is not None:
            values = values / q.smoothing
        amax = formats.row_amax(values)
        if ranks is not None:
            amax = ranks.maximum(amax)
        scale = formats.scale_of(amax, self.largest)
        # No clamp: the quotient passes the limit by an ulp at most, and rounding takes it back.
        scaled = values / scale
        return (scaled.round_() if self._integer else formats.fp8_rounded(scaled)), scale

    def _on_cuda(self, tokens: torch.Tensor, q: QuantizedWeight, ranks: Ranks | None) -> torch.Tensor:
        codes, scale = self._packed_activations(tokens, q, ranks)
        if self._integer:
            accumulated = products.int8_accumulate(codes, q)
            if ranks is not None:
                accumulated = ranks.total(accumulated)
            return accumulated * scale * q.scales[: q.rows].t()
        product = products.fp8_row_product(codes, scale, q, torch.float32)
        return product if ranks is None else ranks.total(product)

    def _packed_activations(
        self, tokens: torch.Tensor, q: QuantizedWeight, ranks: Ranks | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes [T, padded K] in their own type, and their scales [T, 1]."""
        if ranks is None and kernels.available():
            from megatron_rl.quantization.kernels.activations import quantize_rows

            return quantize_rows(tokens, self.code_type, columns=q.codes.shape[1], smoothing=q.smoothing)
        codes, scale = self._activation_codes(tokens, q, ranks)
        padding = q.codes.shape[1] - q.columns
        return torch.nn.functional.pad(codes, (0, padding)).to(self.code_type), scale

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight, ranks: Ranks | None = None) -> torch.Tensor:
        """See `Recipe.round_trip`."""
        codes, scale = self._activation_codes(x.reshape(-1, q.columns), q, ranks)
        values = codes * scale
        if q.smoothing is not None:
            values = values * q.smoothing
        return values.to(x.dtype).view(x.shape)
