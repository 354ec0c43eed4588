"""Run micro-batches through megatron's schedules, also over pipeline stages, and take an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.platform.collectives import gather_json
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome

Forward = Callable[[torch.nn.Module, TokenBatch], torch.Tensor]
Loss = Callable[[torch.Tensor, TokenBatch], MicroLoss]
Sums = Mapping[str, torch.Tensor]
Updates = Sequence[Sequence[TokenBatch]]
"""This rank's micro-batches of each update."""


@dataclass(frozen=True)
class TrainOutcome:
    """The result of a step's updates, or of a whole step; equal on all ranks except for the batches."""

    metrics: dict[str, float]
    updates: Updates = ()
    """The training batches with advantages and fixed log-probs; dropped when the step is over."""
    of_policy: Sequence[UpdateOutcome] = ()
    of_critic: Sequence[UpdateOutcome] = ()
    tokens: int = 0
    """Tokens generated (RL) or trained on (supervised)."""

    @property
    def applied_updates(self) -> int:
        """Number of applied updates of the policy."""
        return sum(one.applied for one in self.of_policy)

    @property
    def critic_updates(self) -> int:
        """Number of applied updates of the critic."""
        return sum(one.applied for one in self.of_critic)

    @property
    def skipped_updates(self) -> int:
        """Number of skipped updates of both, due to non-finite gradients."""
        return sum(one.skipped for one in (*self.of_policy, *self.of_critic))


def run_schedule(
    chunks: Sequence[torch.nn.Module], batches: Sequence[TokenBatch], forward: Forward,
    read: Callable[[torch.Tensor, TokenBatch], Any], forward_only: bool = False,
) -> list[Any]:  # fmt: skip
    """Run forward and backward passes of all ``batches``; collective over the stages of a model copy.

    Args:
        chunks: this rank's, in order; DDP-wrapped for gradients.
        batches: at least one, the same on every stage. With several stages all have one length, and with interleaved
            stages their number is a multiple of the stages.
        read: processes the last chunk's output; returns (loss, denominator, result), or with ``forward_only`` the
            result.

    Returns:
        The result of each micro-batch; empty unless this rank has the last layers.
    """

    def step(left: Iterator[TokenBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(left)
        # megatron's argument name for passes without a loss.
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


def update(
    optimization: Optimization, micro_batches: Sequence[TokenBatch], forward: Forward, loss: Loss
) -> tuple[UpdateOutcome, list[Sums]]:
    """Accumulate gradients over this rank's micro-batches and take one step; collective.

    The gradient is that of ``sum(totals) / sum(denominators)`` over all micro-batches of all data-parallel ranks: two
    micro-batches equal one. Ranks may have different numbers of micro-batches, also none. Context-parallel ranks have
    the same ones, and each computes the gradient of its share.

    Returns:
        The outcome, and each micro-batch's sums (on the last pipeline stage only).
    """

    def reduce(output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        total, denominator, sums = loss(output, batch)
        return total, denominator.int() * batch.is_counted_here, sums

    optimization.zero_grad()
    sums: list[Sums] = []
    if micro_batches:
        sums = run_schedule(optimization.wrapped, micro_batches, forward, reduce)
    else:
        optimization.reduce_without_samples()
    optimization.release_memory(level=1)
    outcome = optimization.step()
    optimization.release_memory(level=2)
    return outcome, sums


def reduce_sums(parts: Sequence[Sums], data_group: dist.ProcessGroup, device: torch.device) -> dict[str, torch.Tensor]:
    """Sum ``parts`` over all ranks, on the host, fp64; collective, one device read.

    Names ending in ``_max`` get the maximum. All parts have the same names and shapes; a rank may have none.
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


def outcome_metrics(outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
    """Return optimizer metrics of a step's updates: the mean norm, the last learning rate."""
    metrics = {
        "actor/grad_norm": sum(outcome.grad_norm for outcome in outcomes) / len(outcomes),
        "actor/lr": outcomes[-1].learning_rate,
        "actor/skipped_updates": float(sum(outcome.skipped for outcome in outcomes)),
        "actor/empty_updates": float(sum(outcome.is_empty for outcome in outcomes)),
    }
    zeros = [outcome.num_zeros for outcome in outcomes if outcome.num_zeros is not None]
    if zeros:
        metrics["actor/num_zeros_in_grad"] = float(sum(zeros)) / len(zeros)
    return metrics
