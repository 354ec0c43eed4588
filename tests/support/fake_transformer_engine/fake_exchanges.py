"""What Transformer Engine's linears exchange with the tensor-parallel ranks, in plain collectives.

Each takes its way back from the module as it was in the forward pass, as the real ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, there: Collective, back: Collective) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None


def read_by_all(x: torch.Tensor, group: dist.ProcessGroup, in_shares: bool) -> torch.Tensor:
    """What a column-parallel linear multiplies, of this rank's share of the rows or of all of them."""
    return _Exchange.apply(x, group, *((_gathered, _scattered) if in_shares else (_same, _summed)))


def added_up(x: torch.Tensor, group: dist.ProcessGroup, in_shares: bool) -> torch.Tensor:
    """What a row-parallel linear returns: this rank's share of the rows or all of them."""
    return _Exchange.apply(x, group, *((_scattered, _gathered) if in_shares else (_summed, _same)))


def _same(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    assert x.shape[0] % group.size() == 0, f"{x.shape[0]} rows for {group.size()} ranks"
    return _summed(x, group).chunk(group.size())[group.rank()]


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)
