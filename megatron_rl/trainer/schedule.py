"""Micro-batches through megatron's schedules: one rank after the other over pipeline stages, or all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.algorithms import TokenBatch

Forward = Callable[[torch.nn.Module, TokenBatch], torch.Tensor]


def through_schedule(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[TokenBatch],
    forward: Forward,
    read: Callable[[torch.Tensor, TokenBatch], Any],
    forward_only: bool = False,
) -> list[Any]:
    """Forward and backward passes of all ``batches``; collective over the stages of a model copy.

    Args:
        chunks: this rank's, in their order: wrapped by DDP where gradients are wanted.
        batches: at least one, the same on every stage. Over several stages all have one length, which sizes what a
            stage receives, and interleaved their number is a multiple of the stages.
        read: of the last chunk's output: with gradients loss, denominator and what is kept, else what is kept alone.

    Returns:
        What was kept of each micro-batch; nothing where the last layers are on another rank.
    """

    def step(left: Iterator[TokenBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(left)
        # megatron names what it reads without a loss.
        return forward(model, batch), lambda output, non_loss_data=True: read(output, batch)

    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(batches),
        seq_length=batches[0].loss_mask.numel(),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
