"""The critic in a step: values before the updates, its own updates, and whitened advantages.

On ``P0 P1 A0 E`` the model's output at a token predicts the return after it; like a log-prob, a value is stored at the
next token::

    output at            P0        P1        A0       E
    value of token       P1        A0        E        (end of the sequence)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.algorithms.batch import CriticValues, TokenBatch
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome
from megatron_rl.trainer.scoring import PackedForward
from megatron_rl.trainer.update import Updates


class ValueScorer(PackedForward):
    """Computes the critic's values of packed batches."""

    def after(self, output: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the expected return after each token, [T] fp32; ``output`` [W, 1] is that of `forward`."""
        values = output[:, 0]
        return values if batch.packing.share is None else batch.packing.share.whole(values, self.groups.context_group)

    @torch.no_grad()
    def all_after(self, batches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Return `after` of each batch, without gradient; collective over pipeline stages, returned on each."""
        return self._shared(self._read_all(batches, self.forward, self.after), batches, torch.float32)


def before(after: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the expected return before each token, [T]; 0 at the first one of a sequence."""
    return torch.where(batch.packing.position_ids > 0, after.roll(1), 0.0)


def value_loss(values: torch.Tensor, batch: TokenBatch, clip_range: float) -> MicroLoss:
    """Return ``0.5 max((V - R)^2, (V_clipped - R)^2)``, V_clipped within ``clip_range`` of the value before the step.

    PPO's value loss (arXiv 1707.06347, as in its published code), divided by the loss tokens. ``values`` [T] have
    gradients; the batch has old values and returns.
    """
    in_loss = batch.in_loss
    # Masked first: masked values may be NaN, whose gradient a factor of 0 would not remove.
    new, old, target = (torch.where(in_loss, each, 0.0) for each in (values, batch.values, batch.critic.returns))
    plain = (new - target).square()
    clipped = (old + (new - old).clamp(-clip_range, clip_range) - target).square()
    total, tokens = 0.5 * torch.maximum(plain, clipped).sum(), in_loss.sum()
    sums = {
        "critic/vf_loss": total,
        "critic/vf_clipfrac": (clipped > plain).sum(),
        "critic/vpred_mean": new.sum(),
        "tokens": tokens,
    }
    return total, tokens, {name: value.detach() for name, value in sums.items()}


@dataclass(frozen=True)
class Critic:
    """The value model with its optimizer."""

    optimization: Optimization
    scorer: ValueScorer
    clip_range: float

    def with_values(self, updates: Updates) -> Updates:
        """Return the batches with the critic's current values; collective."""
        # With --overlap-param-gather the first forward pass would wait for ranks without batches.
        self.optimization.gather_parameters()
        return [
            [_with_values(*each) for each in zip(part, self.scorer.all_after(part), strict=True)] for part in updates
        ]

    def update(self, updates: Updates) -> tuple[dict[str, float], list[UpdateOutcome]]:
        """Take one optimizer step per update; collective. Return metrics under verl's names, and the outcomes."""
        outcomes, totals = self.scorer.update(self.optimization, updates, self._loss)
        tokens = max(float(totals.pop("tokens")), 1.0)
        metrics = {name: float(total) / tokens for name, total in totals.items()}
        metrics |= {
            "critic/grad_norm": sum(outcome.grad_norm for outcome in outcomes) / len(outcomes),
            "critic/lr": outcomes[-1].learning_rate,
            "critic/skipped_updates": float(sum(outcome.skipped for outcome in outcomes)),
        }
        return metrics | self.scorer.balance_metrics(), outcomes

    def _loss(self, output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        return value_loss(before(self.scorer.after(output, batch), batch), batch, self.clip_range)


def _with_values(batch: TokenBatch, after: torch.Tensor) -> TokenBatch:
    ends = after[batch.packing.cu_seqlens[1:].long() - 1]
    return replace(batch, critic=CriticValues(before(after, batch), ends))


def whiten(updates: Updates, groups: ParallelGroups, device: torch.device, epsilon: float) -> Updates:
    """Normalise advantages by their mean and std (ddof 1) + ``epsilon`` over the step's loss tokens; collective."""
    rows = [_moments(batch.in_loss, batch.advantages) for part in updates for batch in part]
    sums = sum(rows, torch.zeros(3, dtype=torch.float64, device=device))
    dist.all_reduce(sums, group=groups.data_group)
    count, total, squares = sums
    mean = total / count.clamp_min(1)
    std = ((squares - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)).sqrt()

    def change(batch: TokenBatch) -> TokenBatch:
        changed = (batch.advantages - mean) / (std + epsilon)
        return replace(batch, advantages=torch.where(batch.in_loss, changed, 0.0).float())

    return [[change(batch) for batch in part] for part in updates]


def value_metrics(updates: Updates, groups: ParallelGroups, device: torch.device) -> dict[str, float]:
    """Return metrics of the critic before its updates, over the step's loss tokens; collective.

    The explained variance is 1 - var(R - V) / var(R): 1 for a perfect critic, 0 for a constant one, negative for a
    worse one; 0 if all returns are equal.
    """
    rows = [
        torch.cat([_moments(b.in_loss, b.critic.returns), _moments(b.in_loss, b.critic.returns - b.values)])
        for b in (batch for part in updates for batch in part)
    ]
    sums = sum(rows, torch.zeros(6, dtype=torch.float64, device=device))
    dist.all_reduce(sums, group=groups.data_group)
    count, returns, squares, _, errors, squared_errors = sums.tolist()  # once a step, for the log
    count = max(count, 1.0)
    variance = squares / count - (returns / count) ** 2
    left = squared_errors / count - (errors / count) ** 2
    return {
        "critic/values/mean": (returns - errors) / count,
        "critic/returns/mean": returns / count,
        "critic/vf_explained_var": 1 - left / variance if variance > 1e-12 else 0.0,
    }


def _moments(in_loss: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return number, sum and sum of squares of the values in the loss, [3] fp64."""
    known = torch.where(in_loss, values, 0.0).double()
    return torch.stack([in_loss.sum().double(), known.sum(), known.square().sum()])
