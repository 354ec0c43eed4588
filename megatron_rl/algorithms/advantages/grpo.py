"""GRPO: reward normalised by mean and standard deviation of its group (DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.groups import group_statistics


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``(r - mean) / (std + epsilon)`` over the valid samples of the group, std with ddof 1."""

    epsilon: float = option(1e-6, gt=0)
    """Added to the standard deviation, in units of reward."""

    def __call__(self, batch: TokenBatch) -> Terms:
        group = group_statistics(batch.step)
        return batch.of_samples(group.centred / (group.std + self.epsilon)), {}
