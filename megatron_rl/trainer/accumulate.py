"""One optimizer step over several micro-batches, through megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome

MicroBatch = TypeVar("MicroBatch")
Statistics = TypeVar("Statistics")


@dataclass(frozen=True)
class MicroLoss:
    """A micro-batch's part of the global loss ``sum(totals) / sum(denominators)``."""

    total: torch.Tensor
    """[] fp32, carries the gradient: weighted sum over the micro-batch, not a mean."""
    denominator: torch.Tensor
    """[] integer, its share of the denominator."""
    statistics: Any
    """Detached sums for the metrics; stay on the device."""


def update(
    optimization: Optimization,
    micro_batches: Sequence[MicroBatch],
    forward: Callable[[torch.nn.Module, MicroBatch], torch.Tensor],
    loss: Callable[[torch.Tensor, MicroBatch], MicroLoss],
) -> tuple[UpdateOutcome, list[Any]]:
    """Accumulate gradients over this rank's micro-batches and step once; collective.

    The gradient is that of ``sum(totals) / sum(denominators)`` over all micro-batches of all
    data-parallel ranks: two micro-batches equal one. Ranks may have different numbers of
    micro-batches, also none.

    Returns:
        What the step did, and each micro-batch's statistics.
    """
    optimization.zero_grad()
    if micro_batches:
        statistics = _accumulate(optimization, micro_batches, forward, loss)
    else:
        _join_reduction(optimization)
        statistics = []
    optimization.release_memory(level=1)
    outcome = optimization.step()
    optimization.release_memory(level=2)
    return outcome, statistics


def _accumulate(
    optimization: Optimization,
    micro_batches: Sequence[MicroBatch],
    forward: Callable[[torch.nn.Module, MicroBatch], torch.Tensor],
    loss: Callable[[torch.Tensor, MicroBatch], MicroLoss],
) -> list[Any]:
    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module):
        batch = next(batches)

        def reduce(logits: torch.Tensor):
            result = loss(logits, batch)
            return result.total, result.denominator.int(), result.statistics

        return forward(model, batch), reduce

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=optimization.wrapped,
        num_microbatches=len(micro_batches),
        seq_length=1,  # read by pipeline schedules only, to size their receive buffers
        micro_batch_size=1,
        forward_only=False,
    )


def _join_reduction(optimization: Optimization) -> None:
    """A rank without samples makes the others' collectives, with zero gradients and a zero denominator."""
    wrapped = optimization.wrapped
    if wrapped.use_forward_hook:
        # The others gather the parameters of the update before as they go forward: last bucket first.
        for bucket_group in reversed(wrapped.bucket_groups):
            bucket_group.finish_param_sync()
    if wrapped.ddp_config.overlap_grad_reduce:
        wrapped.start_grad_sync()
    device = optimization.policy.device
    finalize_model_grads([wrapped], torch.zeros([], dtype=torch.int, device=device))
