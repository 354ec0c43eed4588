"""LoRA adapters of parallel linears and stacked experts: W x + s B A x, or W + s B A; see `families/lora.py`.

Communication between tensor-parallel ranks is as wide as the adapter's rank::

    column   A replicated, B split by rows     A x is gathered (sequence parallelism), or its gradient is summed
    row      A split by columns, B replicated  A x is summed, or each rank gets its share of the tokens

Experts exchange tokens elsewhere: there only the gradients of replicated matrices are summed.
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
"""Row alignment of grouped products."""


class Adapter(torch.nn.Module):
    """The adapter of one linear, or of all experts of a stack, ``[E, ...]``."""

    def __init__(self, parts: Sequence[LowRank], owner: torch.Tensor, dropout: float) -> None:
        """``parts``: one, or one per expert; ``owner`` [outputs of this rank]: the A of each row, -1 for none."""
        super().__init__()
        self.parts, self.scale, self.is_on = tuple(parts), parts[0].scale, True
        """``is_on`` False: use the base linear alone."""
        self._count, self._dropout = len(parts[0].adapted), dropout
        mask = functional.one_hot(owner + 1, self._count + 1)[:, 1:]
        self.register_buffer("mask", mask.bool(), persistent=False)

    def _make(self, like: torch.nn.Parameter, is_column: bool, is_whole: bool) -> None:
        """Create A and B for the weight ``like``; ``is_whole``: it is not split over tensor-parallel ranks."""
        rank, (*experts, outputs, inputs) = self.parts[0].rank, like.shape
        rows, columns, stride = like.dim() - 2, like.dim() - 1, self.parts[0].linear.blocks
        self.lora_a = torch.nn.Parameter(like.new_empty(*experts, self._count * rank, inputs))
        self.lora_b = torch.nn.Parameter(like.new_zeros(*experts, outputs, rank))
        _mark(self.lora_a, like, is_own=is_whole or not is_column, dimension=columns, stride=1)
        _mark(self.lora_b, like, is_own=is_whole or is_column, dimension=rows, stride=stride)

    def named(self) -> Iterator[tuple[Parameter, torch.nn.Parameter]]:
        """Yield each A and B of this rank with its description; of a stack, views of the single experts."""
        for index, part in enumerate(self.parts):
            for described, values in ((part.a, self.lora_a), (part.b, self.lora_b)):
                yield described, values if values.dim() == 2 else expert_of(values, index)

    def merged(self, weight: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """Return W + s B A in fp32, [outputs, inputs] of this rank, or ``weight`` if the adapter is off.

        Rounded to bf16, the sum would lose most of a small adapter: 95 % of it at 2e-4 of the weight's size.
        """
        if not self.is_on:
            return weight
        a, b = (values if expert is None else values[expert] for values in (self.lora_a, self.lora_b))
        return torch.addmm(weight.float(), self._spread(b.float()), a.float(), alpha=self.scale)

    def straight_through(self, seen: torch.Tensor, *args: Any) -> torch.Tensor | float:
        """Return zeros with the adapter's gradient, for a quantised weight that includes the adapter.

        ``seen``: the linear's input after rounding. dA and dB come from products of width r, without dW.
        """
        if not (self.is_on and torch.is_grad_enabled()):
            return 0.0
        added = self(seen.detach(), *args)
        return added - added.detach()

    def _spread(self, b: torch.Tensor) -> torch.Tensor:
        """Expand [..., outputs, r] to [..., outputs, matrices x r]: B in the columns of each row's matrix, else 0."""
        if self._count == 1 and len(self.parts[0].matrices) == 1:
            return b
        return (self.mask[:, :, None] * b[..., :, None, :]).flatten(-2)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        drops = self._dropout and self.training and torch.is_grad_enabled()
        return functional.dropout(x, self._dropout) if drops else x


def low_rank_product(part: LowRank, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return s B A of a whole linear, [outputs, inputs], from its whole A and B."""
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
        # Each rank sees a share of the tokens: megatron sums the gradients of parameters with this mark.
        whole.sequence_parallel = linear.sequence_parallel and self._exchanges and self._group is not None

    def forward(self, x: torch.Tensor, in_shares: bool) -> torch.Tensor:
        """Return the adapter's output for the linear's input; ``in_shares``: sequence parallelism."""
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
    """The adapter of a stack of experts: each has its own A and B."""

    def __init__(self, stack: StackedLinear, parts: Sequence[LowRank], owner: torch.Tensor, dropout: float) -> None:
        super().__init__(parts, owner, dropout)
        self._group = stack.tensor_group if stack.tensor_group.size() > 1 else None
        self._is_column = stack.split == "columns"
        is_whole = self._group is None  # tensor-parallel ranks have other experts then
        self._make(stack.weight, self._is_column, is_whole)

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the addition to the product of ``tokens`` [T, inputs] sorted by expert; ``ends`` [E] int32."""
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
    """Mixin before a linear's class: adds the adapter's output."""

    def forward(self, input_: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        product, bias = super().forward(input_, *args, **named)
        if self.adapter.is_on:
            product = product + self.adapter(input_, self.sequence_parallel)
        return product, bias


class _AdaptedStack:
    """Mixin before the class of a stack of experts: adds the adapter's output."""

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product = super().forward(tokens, ends)
        return product + self.adapter(tokens, ends) if self.adapter.is_on else product


def attach(linear: torch.nn.Module, adapter: Adapter) -> None:
    """Make the linear add the adapter's output, by changing its class.

    A hook or an instance method would not do: rollouts look up ``forward``, and quantised copies replace it for a time.
    """
    linear.adapter = adapter.to(linear.weight.device)
    linear.__class__ = _adapted(type(linear), _AdaptedStack if isinstance(linear, StackedLinear) else _AdaptedLinear)


def adapters_in(model: torch.nn.Module) -> list[Adapter]:
    """List the adapters of a model or chunk in order; empty if it is trained in full."""
    return [module for module in model.modules() if isinstance(module, Adapter)]


@functools.cache
def _adapted(linear: type, ahead: type) -> type:
    return type(f"Adapted{linear.__name__}", (ahead, linear), {})


def _with_summed_gradient(
    a: torch.Tensor, b: torch.Tensor, is_column: bool, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the gradient of the replicated matrix over the ranks of ``group``."""
    if is_column:
        return copy_to_tensor_model_parallel_region(a, group=group), b
    return a, copy_to_tensor_model_parallel_region(b, group=group)


def _mark(values: torch.Tensor, like: torch.Tensor, is_own: bool, dimension: int, stride: int) -> None:
    """Set megatron's marks. ``is_own``: the values are not replicated over tensor-parallel ranks."""
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
