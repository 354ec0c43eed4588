"""The share of a packed batch that a rank runs through the model, and how results return to all tokens.

For C context-parallel ranks every sequence is cut into 2 C chunks; rank r has the chunks r and 2 C - 1 - r. Early
tokens see few keys and late ones many, so all ranks have equal work. On a single rank, sequences may share prefixes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class Share(ABC):
    """W of the T tokens of a packed batch; the value of a computed token is stored in its *cell*."""

    rank: int = 0
    local: Tensor
    """[W] int64: this rank's tokens."""
    query_lengths: tuple[int, ...]
    """Tokens of each span, in the order of ``local``."""
    key_lengths: tuple[int, ...]
    """Keys of each span: its sequence up to the span's last token."""
    query_borders: Tensor
    """[spans + 1] int32."""
    key_borders: Tensor
    """[spans + 1] int32."""
    keys: Tensor
    """[sum of ``key_lengths``] int64: cells (over all ranks) of the keys of each span."""

    @abstractmethod
    def whole(self, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Map the values [W] of this rank's cells to all tokens [T]; ``group`` is context-parallel."""


@dataclass(frozen=True, kw_only=True)
class ContextShare(Share):
    """One rank's tokens of a packed batch of T tokens: W = T / C cells on each of C ranks.

    Sequences of 5 and 3 tokens on two ranks, tokens numbered through the batch::

        chunks     0 1 | 2 | 3 | 4       5 | 6 | 7 |
        rank 0     0 1 5 4               first chunks of all sequences, then second ones
        rank 1     2 6 3 7
        restore    0 1 4 6 3 2 5 7       of tokens 0 to 7, among 0 1 5 4 2 6 3 7

        spans of rank 0 see keys         (0 1): 0 1     (5): 5     (4): 0 1 2 3 4
    """

    restore: Tensor
    """[T] int64: index of each token in the concatenated cells of all ranks."""

    @classmethod
    def of(cls, lengths: Sequence[int], rank: int, size: int, device: torch.device | str = "cpu") -> ContextShare:
        """Divide sequences of ``lengths`` tokens among ``size`` ranks; ``ValueError`` if it does not divide their sum.

        The remainders of uneven chunks go to the ranks in turn, continued from sequence to sequence, so that all ranks
        have the same number of tokens.
        """
        total = sum(lengths)
        if total % size:
            raise ValueError(f"{total} tokens for {size} context-parallel ranks; fill them up to a multiple of {size}")
        borders = _borders(torch.tensor(lengths, dtype=torch.int64))
        chunks = _chunks(borders.diff(), size)
        starts = borders[:-1, None] + chunks.cumsum(1) - chunks
        mine = torch.stack((torch.arange(size), torch.arange(2 * size - 1, size - 1, -1)), 1)  # of rank r: [size, 2]
        tokens = _ranges(starts.t()[mine].flatten(), chunks.t()[mine].flatten())  # [T], as the ranks have them
        restore = torch.empty_like(tokens).scatter_(0, tokens, torch.arange(total))
        queries = chunks.t()[mine[rank]].flatten()
        is_span = queries > 0
        first = borders[:-1].repeat(2)[is_span]  # token of its sequence
        seen = (starts.t()[mine[rank]].flatten() + queries)[is_span] - first
        width = total // size
        return cls(
            rank=rank,
            local=tokens[rank * width : (rank + 1) * width].to(device),
            restore=restore.to(device),
            query_lengths=tuple(queries[is_span].tolist()),
            key_lengths=tuple(seen.tolist()),
            query_borders=_borders(queries[is_span]).int().to(device),
            key_borders=_borders(seen).int().to(device),
            keys=restore[_ranges(first, seen)].to(device),
        )

    def whole(self, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather this rank's values [W] to all tokens [T]; collective over the context-parallel ``group``.

        Every rank computes the same loss from them, so each takes only its own gradient.
        """
        return _GatheredTokens.apply(own, group).index_select(0, self.restore)


@dataclass(frozen=True)
class SharedPrompts(Share):
    """The tokens of a packed batch without prefixes that were computed for an earlier sequence.

    Three sequences, ``A B C D``, ``A B C E F`` and ``G H``, tokens numbered through the batch::

        skipped    0, 2 and 0         D and E are predicted from C: each sequence has its own
        local      0 1 2 3   6 7 8   9 10
        keys       0 1 2 3   0 1 4 5 6   7 8      cells of the tokens 0 to 10, which are also the spans' keys
    """

    @classmethod
    def of(cls, lengths: Sequence[int], skipped: Sequence[int], device: torch.device | str = "cpu") -> SharedPrompts:
        """Reuse the first ``skipped`` tokens of each sequence from the previous one, which starts with them."""
        sizes, beginnings = torch.tensor(lengths), torch.tensor(skipped)
        borders, own = _borders(sizes), sizes - beginnings
        local = _ranges(borders[:-1] + beginnings, own)
        cells = torch.zeros(int(borders[-1]), dtype=torch.int64).index_copy_(0, local, torch.arange(local.numel()))
        for place, (start, count) in enumerate(zip(borders.tolist(), skipped, strict=False)):
            if count:
                before = int(borders[place - 1])
                cells[start : start + count] = cells[before : before + count]
        return cls(
            local=local.to(device),
            query_lengths=tuple(own.tolist()),
            key_lengths=tuple(lengths),
            query_borders=_borders(own).int().to(device),
            key_borders=borders.int().to(device),
            keys=cells.to(device),
        )

    def whole(self, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Give a cell's value to all its tokens; their gradients are summed."""
        return repeated(own, self.keys)


def repeated(cells: Tensor, index: Tensor) -> Tensor:
    """Return ``cells[index]``; gradients are summed in fp32 in a fixed order, also on a GPU."""
    return _Repeated.apply(cells, index)


def _chunks(lengths: Tensor, size: int) -> Tensor:
    """Return the tokens of each chunk of each sequence: [S] -> [S, 2 ``size``]."""
    even, rest = lengths // (2 * size), lengths % (2 * size)
    turn = (torch.arange(size) - (rest.cumsum(0) - rest)[:, None]) % size  # of each rank, [S, size]
    first, second = (even[:, None] + (turn + before < rest[:, None]) for before in (0, size))
    return torch.cat((first, second.flip(1)), 1)


def _borders(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges ``starts[i] .. starts[i] + lengths[i] - 1``."""
    borders = _borders(lengths)
    return (starts - borders[:-1]).repeat_interleave(lengths) + torch.arange(int(borders[-1]))


class _GatheredTokens(torch.autograd.Function):
    """[W, ...] -> [C W, ...] in rank order; backward returns the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        every = own.new_empty(own.shape[0] * group.size(), *own.shape[1:])
        dist.all_gather_into_tensor(every, own.contiguous(), group=group)
        return every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cells: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.count = index, cells.shape[0]
        return cells.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        summed = wide.new_zeros(ctx.count, *grad.shape[1:])
        if grad.is_cuda:  # sorts the index, where index_add_ would add in whatever order threads arrive
            summed.index_put_((ctx.index,), wide, accumulate=True)
        else:
            summed.index_add_(0, ctx.index, wide)
        return summed.to(grad.dtype), None
