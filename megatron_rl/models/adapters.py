"""Low-rank adapters beside parallel linears and stacks of experts: W x + s B A x, or W + s B A; see `families/lora.py`.

What tensor-parallel ranks exchange for an adapter is as wide as its rank::

    column   A whole, B cut by rows         A x is gathered (sequence parallelism), or its gradient is added up
    row      A cut by columns, B whole      A x is added up, or each rank gets its share of the tokens

Experts exchange tokens elsewhere: what their tensor-parallel ranks have whole gets its gradient added up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from megatron_rl.families import Parameter
from megatron_rl.families.lora import LowRank
from megatron_rl.quantization.copies import LinearKind, StackedLinear

_ALIGNED_BYTES = 16
"""Rows of what a grouped product multiplies begin at multiples of this."""


class Adapter(torch.nn.Module):
    """The adapter of one linear; a stack of experts has one for all of them, ``[E, ...]``."""

    def __init__(self, parts: Sequence[LowRank], owner: torch.Tensor, dropout: float) -> None:
        """``parts``: one, or one an expert; ``owner`` [outputs of this rank]: which A a row is of, -1 where none."""
        super().__init__()
        self.parts, self.scale, self.is_on = tuple(parts), parts[0].scale, True
        """``is_on`` False: the linear is the base's alone."""
        self._count, self._dropout = len(parts[0].adapted), dropout
        mask = functional.one_hot(owner + 1, self._count + 1)[:, 1:]
        self.register_buffer("mask", mask.bool(), persistent=False)

    def _make(self, like: torch.nn.Parameter, is_column: bool, is_whole: bool) -> None:
        """Make A and B beside the weight ``like``; if it ``is_whole``, no other tensor-parallel rank has a part."""
        rank, (*experts, outputs, inputs) = self.parts[0].rank, like.shape
        rows, columns, stride = like.dim() - 2, like.dim() - 1, self.parts[0].linear.blocks
        self.lora_a = torch.nn.Parameter(like.new_empty(*experts, self._count * rank, inputs))
        self.lora_b = torch.nn.Parameter(like.new_zeros(*experts, outputs, rank))
        _mark(self.lora_a, like, is_own=is_whole or not is_column, dimension=columns, stride=1)
        _mark(self.lora_b, like, is_own=is_whole or is_column, dimension=rows, stride=stride)

    def named(self) -> Iterator[tuple[Parameter, torch.nn.Parameter]]:
        """Yield each A and B of this rank and what it is in the whole model; of a stack views of the single experts."""
        for index, part in enumerate(self.parts):
            for described, values in ((part.a, self.lora_a), (part.b, self.lora_b)):
                yield described, values if values.dim() == 2 else expert_of(values, index)

    def merged(self, weight: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """Return W + s B A in fp32, [outputs, inputs] of this rank; ``weight`` as it is where the adapter is off.

        Rounding the sum to bf16 would lose most of a small adapter: at 2e-4 of the weight's size 95 % of it.
        """
        if not self.is_on:
            return weight
        a, b = (values if expert is None else values[expert] for values in (self.lora_a, self.lora_b))
        return torch.addmm(weight.float(), self._spread(b.float()), a.float(), alpha=self.scale)

    def straight_through(self, seen: torch.Tensor, *given: Any) -> torch.Tensor | float:
        """Return zeros that have the adapter's gradient, where its numbers are in the quantised weight already.

        ``seen`` is the linear's input after rounding. dW is never formed: dA and dB come of products of width r.
        """
        if not (self.is_on and torch.is_grad_enabled()):
            return 0.0
        added = self(seen.detach(), *given)
        return added - added.detach()

    def _spread(self, b: torch.Tensor) -> torch.Tensor:
        """[..., outputs, r] -> [..., outputs, matrices x r]: B where a row's own matrix is, 0 elsewhere."""
        if self._count == 1 and len(self.parts[0].matrices) == 1:
            return b
        return (self.mask[:, :, None] * b[..., :, None, :]).flatten(-2)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        drops = self._dropout and self.training and torch.is_grad_enabled()
        return functional.dropout(x, self._dropout) if drops else x


def low_rank_product(part: LowRank, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return s B A of a whole linear, [outputs, inputs], of all of its A and B."""
    owner = torch.cat([torch.full((count,), index) for index, count in part.owners])
    mask = functional.one_hot(owner + 1, len(part.adapted) + 1)[:, 1:].to(b.dtype)
    return part.scale * (mask[:, :, None] * b[:, None, :]).flatten(1) @ a


class LinearAdapter(Adapter):
    """The adapter of a column- or row-parallel linear."""

    def __init__(self, linear: torch.nn.Module, parts: Sequence[LowRank], owner: torch.Tensor, dropout: float) -> None:
        super().__init__(parts, owner, dropout)
        kind = LinearKind.of(linear)
        self._group, self._is_column, self._exchanges = kind.group, kind.split == "columns", kind.exchanges
        is_whole = kind.is_expert and kind.group is None  # tensor-parallel ranks have other experts then
        self._make(linear.weight, self._is_column, is_whole)
        whole = self.lora_a if self._is_column else self.lora_b
        # Each rank sees a share of the tokens then: megatron adds up the gradients of what has this mark.
        whole.sequence_parallel = linear.sequence_parallel and self._exchanges and self._group is not None

    def forward(self, x: torch.Tensor, in_shares: bool) -> torch.Tensor:
        """Return what is added to the output, given the linear's own input; ``in_shares``: ranks share the tokens."""
        group, a, b = self._group, self.lora_a, self.lora_b
        if group is not None and not self._exchanges:
            a, b = _with_summed_gradient(a, b, self._is_column, group)
        inner = torch.matmul(self._dropped(x), a.t())
        if group is not None and self._exchanges:
            if self._is_column:
                exchange = gather_from_sequence_parallel_region if in_shares else copy_to_tensor_model_parallel_region
            elif in_shares:
                exchange = reduce_scatter_to_sequence_parallel_region
            else:
                exchange = reduce_from_tensor_model_parallel_region
            inner = exchange(inner, group=group)
        return torch.matmul(inner * self.scale, self._spread(b).t())


class StackAdapter(Adapter):
    """The adapter of a stack of experts: each has an A and a B of its own."""

    def __init__(self, stack: StackedLinear, parts: Sequence[LowRank], owner: torch.Tensor, dropout: float) -> None:
        super().__init__(parts, owner, dropout)
        self._group = stack.tensor_group if stack.tensor_group.size() > 1 else None
        self._is_column = stack.split == "columns"
        is_whole = self._group is None  # tensor-parallel ranks have other experts then
        self._make(stack.weight, self._is_column, is_whole)

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return what is added to the product of ``tokens`` [T, inputs] sorted by expert; ``ends`` [E] int32."""
        a, b = self.lora_a, self.lora_b
        if self._group is not None:
            a, b = _with_summed_gradient(a, b, self._is_column, self._group)
        b = self._spread(b)
        missing = -b.shape[-1] % (_ALIGNED_BYTES // b.element_size())
        if missing:
            a, b = functional.pad(a, (0, 0, 0, missing)), functional.pad(b, (0, missing))
        inner = functional.grouped_mm(self._dropped(tokens), a.transpose(1, 2), offs=ends)
        return functional.grouped_mm(inner * self.scale, b.transpose(1, 2), offs=ends)


class _AdaptedLinear:
    """Ahead of a linear's own class: its output and the adapter's."""

    def forward(self, input_: torch.Tensor, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        product, bias = super().forward(input_, *given, **named)
        if self.adapter.is_on:
            product = product + self.adapter(input_, self.sequence_parallel)
        return product, bias


class _AdaptedStack:
    """The same of a stack of experts."""

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product = super().forward(tokens, ends)
        return product + self.adapter(tokens, ends) if self.adapter.is_on else product


def attach(linear: torch.nn.Module, adapter: Adapter) -> None:
    """Add the adapter's output to the linear's from now on.

    Not by a hook or a method of the instance: rollouts look up ``forward``, and quantised copies hide it for a while.
    """
    linear.adapter = adapter.to(linear.weight.device)
    linear.__class__ = _adapted(type(linear), _AdaptedStack if isinstance(linear, StackedLinear) else _AdaptedLinear)


def adapters_in(model: torch.nn.Module) -> list[Adapter]:
    """List the adapters of a model or a chunk of it, in its order; none in a model that is trained in full."""
    return [module for module in model.modules() if isinstance(module, Adapter)]


@functools.cache
def _adapted(linear: type, ahead: type) -> type:
    return type(f"Adapted{linear.__name__}", (ahead, linear), {})


def _with_summed_gradient(
    a: torch.Tensor, b: torch.Tensor, is_column: bool, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """What all ranks of ``group`` have whole gets the sum of the gradients that each has a part of."""
    if is_column:
        return copy_to_tensor_model_parallel_region(a, group=group), b
    return a, copy_to_tensor_model_parallel_region(b, group=group)


def _mark(values: torch.Tensor, like: torch.Tensor, is_own: bool, dimension: int, stride: int) -> None:
    """megatron's marks. ``is_own``: no other tensor-parallel rank has these numbers."""
    set_tensor_model_parallel_attributes(values, is_own, dimension, stride)
    values.allreduce = getattr(like, "allreduce", True)


def expert_of(stack: torch.nn.Parameter, index: int) -> torch.nn.Parameter:
    """Return a view of one expert's part of ``stack``, with megatron's marks."""
    part = torch.nn.Parameter(stack.detach()[index], requires_grad=False)
    set_tensor_model_parallel_attributes(
        part, stack.tensor_model_parallel, stack.partition_dim - 1, stack.partition_stride
    )
    if hasattr(stack, "main_grad"):
        part.main_grad = stack.main_grad[index]
    return part
