"""One optimizer step over several micro-batches, through megatron's schedule, and the sums of its statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.platform.collectives import gather_json
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome
from megatron_rl.trainer.schedule import Forward, through_schedule

Loss = Callable[[torch.Tensor, TokenBatch], MicroLoss]
Sums = Mapping[str, torch.Tensor]
Updates = Sequence[Sequence[TokenBatch]]
"""This rank's micro-batches of each update."""


def update(
    optimization: Optimization, micro_batches: Sequence[TokenBatch], forward: Forward, loss: Loss
) -> tuple[UpdateOutcome, list[Sums]]:
    """Accumulate gradients over this rank's micro-batches and step once; collective.

    The gradient is that of ``sum(totals) / sum(denominators)`` over all micro-batches of all
    data-parallel ranks: two micro-batches equal one. Ranks may have different numbers of
    micro-batches, also none. Context-parallel ranks have the same, and each the gradient of its share.

    Returns:
        What the step did, and each micro-batch's sums: on the last pipeline stage, elsewhere none.
    """

    def reduce(output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        total, denominator, sums = loss(output, batch)
        return total, denominator.int() * batch.is_counted_here, sums

    optimization.zero_grad()
    sums: list[Sums] = []
    if micro_batches:
        sums = through_schedule(optimization.wrapped, micro_batches, forward, reduce)
    else:
        optimization.join_reduction()
    optimization.release_memory(level=1)
    outcome = optimization.step()
    optimization.release_memory(level=2)
    return outcome, sums


def reduced(parts: Sequence[Sums], data_group: dist.ProcessGroup, device: torch.device) -> dict[str, torch.Tensor]:
    """``parts`` of all ranks added up, on the host, fp64; collective, one read of the device.

    Of a name that ends in ``_max`` the largest. All parts of a rank have the same names and shapes; it may have none.
    """
    own = {name: value.numel() for name, value in parts[0].items()} if parts else {}
    sizes = {name: size for known in gather_json(own, data_group) for name, size in known.items()}
    if not sizes:
        return {}
    largest = sorted(name for name in sizes if name.endswith("_max"))
    added = sorted(set(sizes) - set(largest))
    totals = torch.zeros(sum(sizes[name] for name in added), dtype=torch.float64, device=device)
    maxima = torch.full((len(largest),), -torch.inf, dtype=torch.float64, device=device)
    for part in parts:
        totals += torch.cat([part[name].reshape(-1).double() for name in added])
        if largest:
            maxima = torch.maximum(maxima, torch.stack([part[name].double() for name in largest]))
    dist.all_reduce(totals, group=data_group)
    if largest:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=data_group)
    read = torch.cat((totals, maxima)).cpu().split([sizes[name] for name in [*added, *largest]])
    return {name: value if sizes[name] > 1 else value[0] for name, value in zip([*added, *largest], read, strict=True)}
