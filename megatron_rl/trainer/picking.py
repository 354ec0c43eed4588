"""Which tokens of an update a loss treats otherwise than the rest: picked over all micro-batches of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.covariance import PicksTokens, covariance, first, moments, places
from megatron_rl.algorithms.extension import Function
from megatron_rl.platform.collectives import gather_vectors


def picked(
    loss: Function, updates: Sequence[Sequence[TokenBatch]], data_group: dist.ProcessGroup
) -> Sequence[Sequence[TokenBatch]]:
    """``updates``, scored and with advantages, with `TokenBatch.picked` where the loss wants it.

    The same tokens in every layout and packing: two micro-batches equal one. Collective over the training replicas if
    the loss picks: each tells three sums, and of its tokens those that can be among the first.
    """
    if not isinstance(loss, PicksTokens):
        return updates
    return [_picked(loss, part, data_group) for part in updates]


def _picked(loss: PicksTokens, part: Sequence[TokenBatch], data_group: dist.ProcessGroup) -> list[TokenBatch]:
    own = sum((moments(batch) for batch in part), torch.zeros(3, dtype=torch.float64))
    # On the host: the number of tokens says how many are picked, and how much is exchanged.
    sums = torch.stack(gather_vectors(own.cpu(), data_group)).sum(0)
    count = loss.count(int(sums[0]))
    priorities = [loss.priority(batch, covariance(batch, sums.to(batch.loss_mask.device))) for batch in part]
    numbers = [places(batch) for batch in part]
    best, where = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    if part:
        values, of = torch.cat(priorities), torch.cat(numbers)
        mine = first(values, of, count)
        best, where = values[mine].cpu(), of[mine].cpu()
    all_best, all_where = torch.cat(gather_vectors(best, data_group)), torch.cat(gather_vectors(where, data_group))
    chosen = all_where[first(all_best, all_where, count)]
    return [
        replace(batch, picked=torch.isin(own, chosen.to(own.device)) & batch.in_loss)
        for batch, own in zip(part, numbers, strict=True)
    ]
