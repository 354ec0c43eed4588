"""Attention of a share of a packed batch: that of a context-parallel rank, or sequences that share their beginnings.

A context-parallel rank has its share of every sequence, and all keys and values up to it.

Keys and values of all ranks are gathered once a layer, and their gradients summed and scattered once a layer. What was
gathered is not kept but gathered again in the backward pass, so a rank keeps its own tokens alone. Gathering costs
little beside attention itself, puts no constraint on heads, as an exchange of tokens for heads would, and leaves
kernels as they are, as a ring would not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.batch import Packing
from megatron_rl.algorithms.context import Share, repeated
from megatron_rl.models.attention.backend import PackedKernel
from megatron_rl.models.attention.plan import PackedPlan, Ropes, prepared_for


@dataclass
class SharePlan(PackedPlan):
    """A `PackedPlan` for a share of a batch's tokens."""

    share: Share | None = None
    context_group: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, packing: Packing, ropes: Ropes, dtype: torch.dtype, kernel: PackedKernel,
        context_group: dist.ProcessGroup, windows: Iterable[int | None] = (None,),
    ) -> SharePlan:  # fmt: skip
        """Make the plan of ``packing``, which has a share; tensors of the model are [W, 1, ...]."""
        share = packing.share
        prepared = {window: prepared_for(window, kernel.spans.prepare, share) for window in windows}
        return cls.build(
            packing.lengths, packing.cu_seqlens, packing.position_ids[share.local], ropes, dtype, kernel,
            prepared=prepared, share=share, context_group=context_group,
        )  # fmt: skip


class SharedPromptsPlan(SharePlan):
    """The places where sequences share their beginnings."""

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *prepared: Any) -> torch.Tensor:
        """See `PackedPlan`; T is W."""
        widths = key.shape[-1], value.shape[-1]
        keys, values = repeated(torch.cat((key, value), -1), self.share.keys).split(widths, -1)
        return self.kernel.spans.attend(query, keys, values, *prepared)


class ContextPlan(SharePlan):
    """The parts of sequences that each context-parallel rank has."""

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *prepared: Any) -> torch.Tensor:
        """See `PackedPlan`; T is W. Collective, in the backward pass too."""
        kept = _KeysOfAll(key, value, self.share.keys, self.context_group)
        keys, values = _GatheredKeys.apply(key, value, kept)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            output = self.kernel.spans.attend(query, keys, values, *prepared)
        return _GatherAgain.apply(output, kept)


class _KeysOfAll:
    """Keys and values that the spans of this rank see, while a kernel runs, forward or backward.

    `_GatherAgain` stands behind the kernel and `_GatheredKeys` before it, so that in the backward pass every rank
    gathers once, whatever its kernel has kept.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor, context_group: dist.ProcessGroup
    ) -> None:
        """This rank's keys and values, [W, 1, groups, D]; values may be of another width."""
        self._own, self.index, self.group = (key.detach(), value.detach()), index, context_group
        self.widths = key.shape[-1], value.shape[-1]
        self._seen: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def gather(self) -> tuple[torch.Tensor, ...]:
        """Keys and values, [K, 1, groups, D] each; collective."""
        own = torch.cat(self._own, -1)  # in one message
        every = own.new_empty(own.shape[0] * self.group.size(), *own.shape[1:])
        dist.all_gather_into_tensor(every, own, group=self.group)
        self._seen = tuple(part.index_select(0, self.index) for part in every.split(self.widths, -1))
        return self._seen

    def drop(self) -> None:
        """Forget what was gathered; the kernel is through."""
        self._seen = ()

    def pack(self, saved: torch.Tensor) -> torch.Tensor | tuple[Any, ...]:
        """Return what autograd keeps in place of ``saved``, if that is a view of what was gathered."""
        for which, seen in enumerate(self._seen):
            if saved.untyped_storage().data_ptr() == seen.untyped_storage().data_ptr():
                return which, saved.shape, saved.stride(), saved.storage_offset()
        return saved

    def unpack(self, packed: torch.Tensor | tuple[Any, ...]) -> torch.Tensor:
        """Undo `pack`, once gathered again."""
        return packed if isinstance(packed, torch.Tensor) else self._seen[packed[0]].as_strided(*packed[1:])


class _GatheredKeys(torch.autograd.Function):
    """This rank's keys and values to those that its spans see; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, kept: _KeysOfAll) -> tuple[torch.Tensor, ...]:
        ctx.kept, ctx.tokens = kept, key.shape[0]
        return kept.gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, grad = ctx.kept, grads[0]
        kept.drop()
        every = grad.new_zeros(ctx.tokens * kept.group.size(), *grad.shape[1:-1], sum(kept.widths))
        for part, own in zip(every.split(kept.widths, -1), grads, strict=True):
            part.index_add_(0, kept.index, own)
        summed = grad.new_empty(ctx.tokens, *every.shape[1:])
        dist.reduce_scatter_tensor(summed, every, group=kept.group)
        return *summed.split(kept.widths, -1), None


class _GatherAgain(torch.autograd.Function):
    """The kernel's output as it is; the first thing that its backward pass meets."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: _KeysOfAll) -> torch.Tensor:
        ctx.kept = kept
        kept.drop()
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.kept.gather()
        return grad, None
