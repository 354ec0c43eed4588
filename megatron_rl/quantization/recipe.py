"""What a quantisation recipe is: quantise, dequantise, multiply.

Shapes: a weight is [N, K] (N outputs, K inputs), activations [..., K]. A number is ``code x scale``. Weights of experts
may lie in one stack, [E, N, K]; each is quantised by itself. Of what tensor-parallel ranks share a recipe sees one
rank's part, which has scales of its own; the caller adds up the products of row-parallel parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from megatron_rl.arithmetic import TILE
from megatron_rl.errors import QuantizationError
from megatron_rl.quantization.shapes import Storage

MOST_TOKENS = 2**16
"""That a gradient's sum takes at once: kernels hold a row in registers, and int32 the sum of its products."""


@dataclass
class QuantizedWeight:
    """The static buffers of one weight, or of a stack, which has a dimension before those below.

    A refresh writes into them; they are never replaced.
    """

    codes: torch.Tensor
    """[N, K] rounded up to what the kernels want (`Storage.stored_shape`); the padding is 0."""
    scales: torch.Tensor
    """fp32; its shape is the recipe's: [N, 1], [1, 1], or one number a 128 x 128 tile."""
    rows: int
    columns: int
    smoothing: torch.Tensor | None = None
    """[K] fp32: the activations are divided by it, the weight is multiplied."""
    operand: torch.Tensor | None = None
    """What the product reads where the device has none for the codes (see ``products``)."""

    def of_expert(self, index: int) -> QuantizedWeight:
        """Return views of one weight of a stack."""
        smoothing, operand = (None if held is None else held[index] for held in (self.smoothing, self.operand))
        return replace(self, codes=self.codes[index], scales=self.scales[index], smoothing=smoothing, operand=operand)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every buffer, the operand last."""
        buffers = (self.codes, self.scales, self.smoothing, self.operand)
        return [tensor for tensor in buffers if tensor is not None]

    @property
    def stored_bytes(self) -> int:
        """Codes, scales and smoothing; without the operand, which only CPUs need."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not self.operand)


@dataclass(frozen=True)
class Packing:
    """The form in which a product wants its activations, for a kernel that quantises them as it makes them."""

    code_type: torch.dtype
    columns: int
    """Of the codes: K, rounded up to what the product takes; zeros from K on."""
    in_segments: bool = False
    """One scale a 128 columns instead of one a token."""
    power_of_two: bool = False
    smoothing: torch.Tensor | None = None
    """fp32 [K] by which the activations are divided first; only where a scale is a token's."""

    def allocate(self, tokens: int, dtype: torch.dtype, device: torch.device) -> PackedActivations:
        """Allocate activations [tokens, K] of ``dtype``; scales [T, 1] or [T, columns / 128] lie column by column."""
        groups = self.columns // TILE if self.in_segments else 1
        codes = torch.empty(tokens, self.columns, dtype=self.code_type, device=device)
        scales = torch.empty(groups, tokens, dtype=torch.float32, device=device)
        return PackedActivations(codes, scales.t(), dtype)


@dataclass(frozen=True)
class PackedActivations:
    """Activations [T, K] that are quantised already, to the numbers that `Recipe.matmul` would have made of them."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    """Of the activations, and of the product."""


class Recipe(Storage, ABC):
    """One number format for weights and activations of a linear layer, without state."""

    name: ClassVar[str]
    format: ClassVar[str]
    """Weights and activations in words, for the audit's table."""
    safer: ClassVar[str] = "none"
    """What `--rl-mismatch-action fallback` goes on with."""

    def device_problem(self, capability: tuple[int, int] | None) -> str | None:
        """Return why a CUDA device of this compute capability (None: a CPU) cannot run it."""
        return None

    @abstractmethod
    def encode(self, weight: torch.Tensor, into: QuantizedWeight) -> None:
        """Fill the buffers."""

    @abstractmethod
    def allocate(self, shape: Sequence[int], device: torch.device) -> QuantizedWeight:
        """Return zeroed buffers of a weight [N, K] or of a stack [E, N, K]."""

    @abstractmethod
    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        """Return fp32 [N, K]; with smoothing it is that of the original weight."""

    @abstractmethod
    def matmul(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Compute ``x W^T`` with both quantised: [..., K] -> [..., N] in the dtype of ``x``."""

    def grouped_matmul(self, x: torch.Tensor, q: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
        """Compute `matmul` of each group of tokens with its expert's weight: [T, K] -> [T, N], ``q`` a stack.

        ``ends`` [E] int32: where each group ends; rows behind the last one are undefined. This definition goes group by
        group, and the host reads ``ends``.
        """
        product = x.new_zeros(x.shape[0], q.rows)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                product[start:end] = self.matmul(x[start:end], q.of_expert(expert))
            start = end
        return product

    def packing(self, q: QuantizedWeight) -> Packing | None:
        """Return how a CUDA kernel may quantise activations of ``q`` for `multiply`; None where only `matmul` can."""
        return None

    def multiply(self, x: PackedActivations, q: QuantizedWeight) -> torch.Tensor:
        """Return `matmul` of what was quantised as `packing` says: [T, N] in the dtype of the activations."""
        raise QuantizationError(f"{self.name} quantises activations itself")

    def grouped_packing(self, q: QuantizedWeight) -> Packing | None:
        """Return `packing` for `grouped_multiply`, ``q`` a stack."""
        return None

    def grouped_multiply(self, x: PackedActivations, q: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
        """Return `grouped_matmul` of what was quantised as `grouped_packing` says."""
        raise QuantizationError(f"{self.name} quantises the activations of experts itself")

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Compute ``dY W`` with both quantised: [T, N] -> [T, K] in the dtype of ``gradient``; for the backward pass.

        ``weight`` [N, K] is what ``q`` is of. The sum is over N, so where a scale is a row's the weight is quantised
        anew, with a scale an input channel: those of ``q`` would stand inside the sum.
        """
        return self.matmul(gradient, self._encoded(weight.t()))

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute ``dY^T X`` with both quantised: [T, N] and [T, K] -> [N, K] in the dtype of ``gradient``.

        The sum is over tokens: ``x`` is quantised as a weight is, and where a scale is a row's it is a channel's over
        all tokens. NaN and infinity come through, as they would unquantised.
        """
        pieces = zip(gradient.split(MOST_TOKENS), x.split(MOST_TOKENS), strict=True)
        return sum(self.matmul(dy.t(), self._encoded(seen.t())) for dy, seen in pieces)

    def _encoded(self, matrix: torch.Tensor) -> QuantizedWeight:
        """`quantize` without its look at the numbers, for which the host would wait."""
        q = self.allocate(matrix.shape, matrix.device)
        self.encode(matrix.detach(), q)
        return q

    @abstractmethod
    def round_trip(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Return ``x`` as ``matmul`` sees it: quantised and back, in its own shape and dtype."""

    def quantize(self, weight: torch.Tensor, smoothing: torch.Tensor | None = None) -> QuantizedWeight:
        """Return new buffers filled from ``weight`` [N, K] of any float type.

        Raises:
            QuantizationError: the weight is no matrix, or holds NaN or infinity.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            shape = f"a weight of shape {list(weight.shape)} and type {weight.dtype}"
            raise QuantizationError(f"{shape} cannot be quantised: a matrix of floats is needed")
        q = self.allocate(weight.shape, weight.device)
        if smoothing is not None:
            q.smoothing = smoothing.float().clone()
        with torch.no_grad():
            if weight.numel() and not bool(weight.isfinite().all()):
                raise QuantizationError(
                    f"a weight of shape {list(weight.shape)} holds NaN or infinity, which {self.name} cannot "
                    "represent; look for the first step with a non-finite gradient or loss"
                )
            self.encode(weight.detach(), q)
        return q
