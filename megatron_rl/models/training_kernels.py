"""Fused residual sum with norm, and rotation of heads, for training on CUDA: rollout kernels with gradients.

Norm weight gradients are summed in two steps in a fixed order, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from megatron_rl.models.kernels import add_norm, rotate_store, rotated

PROGRAMS = 1024
"""Programs of a gradient kernel; each processes several rows and writes one row of partial sums."""


class SumAndNorm(torch.autograd.Function):
    """``output + residual`` and its RMSNorm, [.., hidden] each; without ``output`` the sum is ``residual``."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, output: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = residual if output is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
        flat = [each if each is None else each.reshape(-1, len(weight)) for each in (residual, output, summed)]
        _, normed = add_norm(*flat[:2], None, weight, epsilon, None, flat[2])
        ctx.save_for_backward(summed, weight)
        ctx.epsilon = epsilon
        ctx.set_materialize_grads(False)  # a norm alone has no gradient of the sum
        return summed, normed.view(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        summed, weight = ctx.saved_tensors
        slopes = slopes[0], torch.zeros_like(summed) if slopes[1] is None else slopes[1]
        inputs = [each if each is None else each.contiguous() for each in (summed, *slopes)]
        columns, block, out = len(weight), triton.next_power_of_2(len(weight)), torch.empty_like(inputs[0])
        rows, programs = out.numel() // columns, max(1, min(out.numel() // columns, PROGRAMS))
        sums = weight.new_empty(programs, columns, dtype=torch.float32)
        norm_gradient_kernel[(programs,)](
            *inputs, weight, out, sums, rows, triton.cdiv(rows, programs), columns, ctx.epsilon, BLOCK=block,
            num_warps=min(block // 512 or 1, 16),
        )  # fmt: skip
        of_weight = sums.sum(0).type_as(weight) if ctx.needs_input_grad[2] else None
        return out, out if ctx.needs_input_grad[1] else None, of_weight, None


@triton.jit(do_not_specialize=["rows", "per_program"])
def norm_gradient_kernel(
    summed, of_sum, of_normed, weight, out, sums, rows, per_program, columns, epsilon, BLOCK: tl.constexpr
):
    """Compute the gradient of the sum; a program has ``per_program`` rows, and one row of ``sums``."""
    first = tl.program_id(0).to(tl.int64) * per_program
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros([1, BLOCK], tl.float32)
    for step in range(per_program):
        inside = (column < columns) & (first + step < rows)
        place = (first + step) * columns + column
        slope = tl.load(of_normed + place, mask=inside, other=0.0).to(tl.float32)
        normed, through = _through_norm(summed + place, slope, scale, inside, columns, epsilon)
        total += slope * normed
        if of_sum is not None:
            through += tl.load(of_sum + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, through.to(out.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * columns + column, total, mask=column < columns)


@triton.jit
def _through_norm(place, slope, scale, inside, width, epsilon):
    """Return the normalised rows at ``place`` without the weight ``scale``, and their gradient."""
    numbers = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, 1) / width + epsilon)[:, None]
    normed, slope = numbers * inverse, slope * scale
    return normed, (slope - normed * (tl.sum(slope * normed, 1)[:, None] / width)) * inverse


class RotatedHeads(torch.autograd.Function):
    """Split ``mixed`` (see `rotate_store`) into query, key and value, [T, 1, heads, D]; rotates whole queries and keys.

    ``places`` [T] int64 are 0 to T - 1; ``norms``: RMSNorms of query and key heads with ``weights``, or all None.
    """

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], places: torch.Tensor, norms: Any,
        *weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        tokens, groups, _, width = mixed.shape
        key, value = (mixed.new_empty(tokens, 1, groups, width) for _ in range(2))
        query = rotate_store(mixed, *cos_sin, *norms, key, value, places)
        ctx.save_for_backward(*cos_sin, *weights, None if norms[0] is None else mixed)
        ctx.shape, ctx.epsilon = mixed.shape, getattr(norms[0], "eps", 0.0)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slopes, (*cos_sin, query_norm, key_norm, mixed) = [slope.contiguous() for slope in slopes], ctx.saved_tensors
        tokens, groups, heads, width = ctx.shape
        out, sums, programs = slopes[0].new_empty(ctx.shape), None, tokens
        if mixed is not None:
            programs = min(tokens, triton.cdiv(PROGRAMS, groups))
            sums = out.new_empty(programs * groups, 2, width, dtype=torch.float32)
        rows, block = triton.next_power_of_2(heads), triton.next_power_of_2(width)
        heads_gradient_kernel[(programs, groups)](
            *slopes, mixed, *cos_sin, query_norm, key_norm, ctx.epsilon, out, sums, tokens,
            triton.cdiv(tokens, programs), groups, SHARE=heads - 2, WIDTH=width, HEADS=rows, BLOCK=block,
            num_warps=min(rows * block // 512 or 1, 8),
        )  # fmt: skip
        return out, None, None, None, *((None, None) if sums is None else sums.sum(0).type_as(out))


@triton.jit(do_not_specialize=["tokens", "per_program"])
def heads_gradient_kernel(
    of_query, of_key, of_value, mixed, cos, sin, query_norm, key_norm, epsilon, out, sums, tokens, per_program, groups,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply the inverse rotation and the norms' gradients; a program has ``per_program`` tokens of a group."""
    group, first = tl.program_id(1), tl.program_id(0).to(tl.int64) * per_program
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    other = (column + WIDTH // 2) % WIDTH
    if query_norm is not None:
        scales = tl.where(head < SHARE, query_norm, key_norm) + column
        scale = tl.load(scales, mask=column < WIDTH, other=0.0).to(tl.float32)
        total = tl.zeros([HEADS, BLOCK], tl.float32)
    for step in range(per_program):
        inside = (column < WIDTH) & (first + step < tokens)
        row, angle = (first + step) * groups + group, (first + step) * WIDTH + column
        slope = _slope(of_query, of_key, of_value, row, head, column, inside, SHARE, WIDTH)
        across = _slope(of_query, of_key, of_value, row, head, other, inside, SHARE, WIDTH)
        turned = rotated(slope, -across, cos + angle, sin + angle, inside, out).to(out.dtype.element_ty)
        slope = tl.where(head > SHARE, slope, turned.to(tl.float32))
        place = (row * (SHARE + 2) + head) * WIDTH + column
        inside = inside & (head < SHARE + 2)
        if query_norm is not None:
            normed, through = _through_norm(mixed + place, slope, scale, inside, WIDTH, epsilon)
            total += slope * normed
            slope = tl.where(head > SHARE, slope, through)
        tl.store(out + place, slope.to(out.dtype.element_ty), mask=inside)
    if query_norm is not None:
        place = sums + (tl.program_id(0) * groups + group) * 2 * WIDTH + tl.arange(0, BLOCK)
        within = tl.arange(0, BLOCK) < WIDTH
        tl.store(place, tl.sum(tl.where(head < SHARE, total, 0.0), 0), mask=within)
        tl.store(place + WIDTH, tl.sum(tl.where(head == SHARE, total, 0.0), 0), mask=within)


@triton.jit
def _slope(of_query, of_key, of_value, row, head, column, inside, SHARE: tl.constexpr, WIDTH: tl.constexpr):
    """Load the gradients of a group's queries, key and value."""
    alone = row * WIDTH + column + 0 * head
    slope = tl.load(of_query + (row * SHARE + head) * WIDTH + column, mask=inside & (head < SHARE), other=0.0)
    slope += tl.load(of_key + alone, mask=inside & (head == SHARE), other=0.0)
    return (slope + tl.load(of_value + alone, mask=inside & (head == SHARE + 1), other=0.0)).to(tl.float32)
