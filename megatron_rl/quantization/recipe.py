"""The interface of quantisation recipes: quantise, dequantise, multiply.

Shapes: a weight is [N, K] (N outputs, K inputs), activations [..., K]. A number is ``code x scale``. Experts may be
stacked, [E, N, K], each quantised separately. A recipe sees one tensor-parallel rank's part, with its own scales; the
caller sums the products of row-parallel parts.
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
"""Tokens per product of a weight gradient: kernels hold a row in registers, and sums of products must fit in int32."""


@dataclass
class QuantizedWeight:
    """The static buffers, refreshed in place, of one weight, or of a stack, with an additional first dimension."""

    codes: torch.Tensor
    """[N, K], zero-padded for the kernels (`Storage.stored_shape`)."""
    scales: torch.Tensor
    """fp32, in the recipe's shape: [N, 1], [1, 1], or one per 128 x 128 tile."""
    rows: int
    columns: int
    smoothing: torch.Tensor | None = None
    """[K] fp32: activations are divided by it, weights multiplied."""
    operand: torch.Tensor | None = None
    """Operand of the product on devices that cannot multiply codes."""

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
        """Bytes of codes, scales and smoothing; the operand exists on CPUs only."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not self.operand)


@dataclass(frozen=True)
class Packing:
    """The format of a product's activations, for kernels that quantise their output."""

    code_type: torch.dtype
    columns: int
    """K rounded up for the product; the padding is zero."""
    in_segments: bool = False
    """One scale per 128 columns instead of one per token."""
    power_of_two: bool = False
    smoothing: torch.Tensor | None = None
    """fp32 [K]: divides the activations first; only with scales per token."""

    def allocate(self, tokens: int, dtype: torch.dtype, device: torch.device) -> PackedActivations:
        """Allocate activations [tokens, K] of ``dtype``; scales [T, 1] or [T, columns / 128] are column-major."""
        groups = self.columns // TILE if self.in_segments else 1
        codes = torch.empty(tokens, self.columns, dtype=self.code_type, device=device)
        scales = torch.empty(groups, tokens, dtype=torch.float32, device=device)
        return PackedActivations(codes, scales.t(), dtype)


@dataclass(frozen=True)
class PackedActivations:
    """Quantised activations [T, K], equal to those that `Recipe.matmul` would make."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    """Dtype of the unquantised activations and of the product."""


class Recipe(Storage, ABC):
    """A number format for weights and activations of linear layers; stateless."""

    name: ClassVar[str]
    format: ClassVar[str]
    """Description for the audit's table: weights x activations."""
    safer: ClassVar[str] = "none"
    """Next recipe for `--rl-mismatch-action fallback`."""

    def device_problem(self, capability: tuple[int, int] | None) -> str | None:
        """Return why a CUDA device of this compute capability (None: a CPU) cannot run it; None if it can."""
        return None

    @abstractmethod
    def encode(self, weight: torch.Tensor, into: QuantizedWeight) -> None:
        """Quantise ``weight`` into the buffers."""

    @abstractmethod
    def allocate(self, shape: Sequence[int], device: torch.device) -> QuantizedWeight:
        """Return zeroed buffers for a weight [N, K] or a stack [E, N, K]."""

    @abstractmethod
    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        """Return fp32 [N, K], without smoothing."""

    @abstractmethod
    def matmul(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Compute ``x W^T`` with both quantised: [..., K] -> [..., N] in the dtype of ``x``."""

    def grouped_matmul(self, x: torch.Tensor, q: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
        """Compute `matmul` of each group of tokens with its expert's weight: [T, K] -> [T, N], ``q`` a stack.

        ``ends`` [E] int32: end of each group; later rows are undefined. This definition loops over groups and reads
        ``ends`` on the host.
        """
        product = x.new_zeros(x.shape[0], q.rows)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                product[start:end] = self.matmul(x[start:end], q.of_expert(expert))
            start = end
        return product

    def packing(self, q: QuantizedWeight) -> Packing | None:
        """Return how a CUDA kernel may quantise activations for `multiply`; None if only `matmul` can."""
        return None

    def multiply(self, x: PackedActivations, q: QuantizedWeight) -> torch.Tensor:
        """Return `matmul` of activations packed as in `packing`: [T, N] in their original dtype."""
        raise QuantizationError(f"{self.name} quantises activations itself")

    def grouped_packing(self, q: QuantizedWeight) -> Packing | None:
        """Return `packing` for `grouped_multiply`, ``q`` a stack."""
        return None

    def grouped_multiply(self, x: PackedActivations, q: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
        """Return `grouped_matmul` of activations packed as in `grouped_packing`."""
        raise QuantizationError(f"{self.name} quantises the activations of experts itself")

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Compute ``dY W`` with both quantised: [T, N] -> [T, K] in the dtype of ``gradient``.

        ``weight`` [N, K] is the original of ``q``. It is requantised with scales per input channel, because the sum
        over N would include the row scales of ``q``.
        """
        return self.matmul(gradient, self._encoded(weight.t()))

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute ``dY^T X`` with both quantised: [T, N] and [T, K] -> [N, K] in the dtype of ``gradient``.

        The sum is over tokens: ``x`` is quantised like a weight, with scales per channel over all tokens. NaN and
        infinity propagate, as without quantisation.
        """
        pieces = zip(gradient.split(MOST_TOKENS), x.split(MOST_TOKENS), strict=True)
        return sum(self.matmul(dy.t(), self._encoded(seen.t())) for dy, seen in pieces)

    def _encoded(self, matrix: torch.Tensor) -> QuantizedWeight:
        """`quantize` without its check, which waits for the device."""
        q = self.allocate(matrix.shape, matrix.device)
        self.encode(matrix.detach(), q)
        return q

    @abstractmethod
    def round_trip(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Return ``x`` as `matmul` sees it: quantised and dequantised, in its own shape and dtype."""

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
