"""Token selection by the covariance of log-prob and advantage, for Clip-Cov and KL-Cov (arXiv 2505.22617).

The covariance is over the whole update, but a loss sees one micro-batch. So tokens are selected before the first one,
from the advantages and the rollout's log-probs. The authors' code uses single micro-batches and current log-probs, so
its result depends on packing and ranks. Before a rollout's first update both log-probs are of one policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import TokenBatch
from megatron_rl.algorithms.extension import Extension
from megatron_rl.config.flags import flag as option


@dataclass(frozen=True, kw_only=True)
class TokenSelection(Extension):
    """A loss that treats some tokens of an update, ``batch.selected``, differently."""

    share: float = option(2e-4, gt=0, le=1)
    """Share of the update's loss tokens to select; at least one token, if any is eligible."""

    def priority(self, batch: TokenBatch, covariance: Tensor) -> Tensor:
        """Return each token's priority, [T] fp64, -inf if ineligible, from `covariance` [T] fp64 (-inf where masked).
        """
        raise NotImplementedError

    def select_tokens(self, part: Sequence[TokenBatch], of_all_ranks: Callable[[Tensor], Tensor]) -> list[TokenBatch]:
        """Return an update's micro-batches, scored and with advantages, with `TokenBatch.selected` set; collective.

        The selection does not depend on layout and packing. ``of_all_ranks`` concatenates a vector over ranks: first
        three sums, then this rank's candidates.
        """
        own = sum((moments(batch).cpu() for batch in part), torch.zeros(3, dtype=torch.float64))
        sums = of_all_ranks(own).view(-1, 3).sum(0)
        count = max(1, int(self.share * int(sums[0])))
        numbers = [places(batch) for batch in part]
        values, where = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
        if part:  # a rank may have no micro-batch
            known = (covariance(batch, sums.to(batch.loss_mask.device)) for batch in part)
            values = torch.cat([self.priority(*each) for each in zip(part, known, strict=True)]).cpu()
            where = torch.cat(numbers).cpu()
        mine = first(values, where, count)
        values, where = of_all_ranks(values[mine]), of_all_ranks(where[mine])
        chosen = where[first(values, where, count)]
        return [
            replace(batch, selected=torch.isin(number, chosen.to(number.device)) & batch.in_loss)
            for batch, number in zip(part, numbers, strict=True)
        ]


def moments(batch: TokenBatch) -> Tensor:
    """Return sums over eligible tokens: count, advantages and log-probs, [3] fp64."""
    counts = _counts(batch)
    values = torch.stack((torch.ones_like(batch.loss_mask), batch.advantages, batch.inference_logprobs)).double()
    return torch.where(counts, values, 0.0).sum(1)


def covariance(batch: TokenBatch, sums: Tensor) -> Tensor:
    """Return ``(advantage - mean) (log-prob - mean)``, [T] fp64, -inf if ineligible; ``sums`` [3]: the update's
    `moments`.
    """
    counts, means = _counts(batch), sums[1:] / sums[0].clamp_min(1)
    product = (batch.advantages.double() - means[0]) * (batch.inference_logprobs.double() - means[1])
    return torch.where(counts, product, -math.inf)


def places(batch: TokenBatch) -> Tensor:
    """Return a unique number for each token of the step, independent of the layout: [T] int64."""
    count = batch.step.rewards.numel()
    samples = batch.of_samples(torch.arange(count, dtype=torch.float64)).long()
    sequences = samples + count * batch.samples.sequence[batch.sequence_index]
    return (sequences << 32) + batch.packing.position_ids


def first(priorities: Tensor, places: Tensor, count: int) -> Tensor:
    """Select the ``count`` highest priorities, ties by place: indices [at most count]."""
    by_place = places.argsort()
    order = by_place[priorities[by_place].argsort(descending=True, stable=True)][:count]
    return order[priorities[order] > -math.inf]


def _counts(batch: TokenBatch) -> Tensor:
    return batch.in_loss & batch.inference_logprobs.isfinite() & batch.advantages.isfinite()
