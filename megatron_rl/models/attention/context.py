"""Attention for a share of a packed batch: of a context-parallel rank, or of sequences with shared prefixes.

A context-parallel rank computes its share of every sequence, against all keys and values up to it.

Each layer gathers keys and values of all ranks, and reduce-scatters their gradients. The gathered tensors are not kept
but gathered again in the backward pass, so a rank stores only its own tokens. Gathering is cheap compared with
attention, works for any number of heads (unlike an exchange of tokens for heads), and needs no special kernels (unlike
a ring).
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
        """Build the plan of ``packing``, which has a share; the model's tensors are [W, 1, ...]."""
        share = packing.share
        prepared = {window: prepared_for(window, kernel.spans.prepare, share) for window in windows}
        return cls.build(
            packing.lengths, packing.cu_seqlens, packing.position_ids[share.local], ropes, dtype, kernel,
            prepared=prepared, share=share, context_group=context_group,
        )  # fmt: skip


class SharedPromptsPlan(SharePlan):
    """Attention where sequences share prefixes."""

    def run_kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *prepared: Any) -> torch.Tensor:
        """See `PackedPlan`; T is W."""
        widths = key.shape[-1], value.shape[-1]
        keys, values = repeated(torch.cat((key, value), -1), self.share.keys).split(widths, -1)
        return self.kernel.spans.attend(query, keys, values, *prepared)


class ContextPlan(SharePlan):
    """Attention of a context-parallel rank, which has a part of each sequence."""

    def run_kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *prepared: Any) -> torch.Tensor:
        """See `PackedPlan`; T is W. Collective, also in the backward pass."""
        kept = _KeyGatherer(key, value, self.share.keys, self.context_group)
        keys, values = _GatheredKeys.apply(key, value, kept)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            output = self.kernel.spans.attend(query, keys, values, *prepared)
        return _Regather.apply(output, kept)


class _KeyGatherer:
    """Gathers the keys and values that this rank's spans see, in the forward and again in the backward pass.

    `_Regather` comes after the kernel and `_GatheredKeys` before it, so that every rank gathers exactly once in the
    backward pass, whatever its kernel saves.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor, context_group: dist.ProcessGroup
    ) -> None:
        """``key`` and ``value``: this rank's, [W, 1, groups, D]; widths may differ."""
        self._own, self.index, self.group = (key.detach(), value.detach()), index, context_group
        self.widths = key.shape[-1], value.shape[-1]
        self._seen: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def gather(self) -> tuple[torch.Tensor, ...]:
        """Return keys and values, [K, 1, groups, D] each; collective."""
        own = torch.cat(self._own, -1)  # in one message
        every = own.new_empty(own.shape[0] * self.group.size(), *own.shape[1:])
        dist.all_gather_into_tensor(every, own, group=self.group)
        self._seen = tuple(part.index_select(0, self.index) for part in every.split(self.widths, -1))
        return self._seen

    def drop(self) -> None:
        """Free the gathered tensors."""
        self._seen = ()

    def pack(self, saved: torch.Tensor) -> torch.Tensor | tuple[Any, ...]:
        """Replace a ``saved`` view of the gathered tensors by its shape and strides."""
        for which, seen in enumerate(self._seen):
            if saved.untyped_storage().data_ptr() == seen.untyped_storage().data_ptr():
                return which, saved.shape, saved.stride(), saved.storage_offset()
        return saved

    def unpack(self, packed: torch.Tensor | tuple[Any, ...]) -> torch.Tensor:
        """Undo `pack`, after `gather`."""
        return packed if isinstance(packed, torch.Tensor) else self._seen[packed[0]].as_strided(*packed[1:])


class _GatheredKeys(torch.autograd.Function):
    """Map this rank's keys and values to those that its spans see; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, kept: _KeyGatherer) -> tuple[torch.Tensor, ...]:
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


class _Regather(torch.autograd.Function):
    """Identity on the kernel's output, whose backward pass, the first to run, gathers again."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: _KeyGatherer) -> torch.Tensor:
        ctx.kept = kept
        kept.drop()
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.kept.gather()
        return grad, None
