"""RLOO: reward minus the mean of the other samples of its group (arXiv 2402.14740).

A baseline that leaves the sample out is independent of it, so the gradient estimate is unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch
from megatron_rl.algorithms.groups import group_statistics


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``r - (sum - r) / (n - 1)``, which is ``(r - mean) n / (n - 1)``, over the group's n valid samples."""

    def __call__(self, batch: TokenBatch) -> Terms:
        group = group_statistics(batch.step)
        return batch.of_samples(group.centred * group.count / (group.count - 1).clamp_min(1)), {}
