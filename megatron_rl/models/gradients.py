"""Hand-written gradients where autograd's are slow: RMSNorm on a CPU, and rotary embedding.

Forward passes are bit-identical to the plain operations that rollouts run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """RMSNorm for CPUs, which have no fused kernel: autograd would make twice as many passes over the data."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = numbers.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(numbers, weight, inverse)
        return (wide * inverse).mul_(weight).type_as(numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        numbers, weight, inverse = ctx.saved_tensors
        normed, wide, scale = numbers.float() * inverse, grad.float(), weight.float()
        product = wide * normed
        share = torch.matmul(product, scale)[..., None] / len(scale)
        of_numbers = (wide * scale).addcmul_(normed, share, value=-1).mul_(inverse)
        return of_numbers.type_as(numbers), product.flatten(0, -2).sum(0).type_as(weight), None


def rms_norm(numbers: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute RMSNorm of the last dimension with ``weight`` [D], in fp32; the result has the dtype of ``numbers``."""
    if torch.is_grad_enabled() and numbers.device.type == "cpu" and numbers.dim() > 1:
        return _RMSNorm.apply(numbers, weight, epsilon)
    return functional.rms_norm(numbers, weight.shape, weight, epsilon)


class _Rotation(torch.autograd.Function):
    """Rotary embedding; the gradient rotates backwards. Autograd would fill a zero tensor for each half of heads."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, -1), None, None


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``heads`` [N, 1, H, D] by their positions; dimensions beyond R are unchanged.

    ``cos`` and ``sin`` [N, 1, 1, R] from `RopeTable.at`: the first half of ``sin`` is negated.
    """
    if torch.is_grad_enabled() and heads.requires_grad:
        return _Rotation.apply(heads, cos, sin)
    return _rotate(heads, cos, sin)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int = 1) -> torch.Tensor:
    rotated = cos.shape[-1]
    if rotated < heads.shape[-1]:
        return torch.cat((_rotate(heads[..., :rotated], cos, sin, direction), heads[..., rotated:]), dim=-1)
    half = rotated // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos, swapped, sin, value=direction)
