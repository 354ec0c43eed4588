"""Reward normalised by the mean and standard deviation of the whole step (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.groups import normalised


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``(r - mean) / (std + epsilon)`` over all valid samples of the step, on all ranks; std with ddof 1."""

    BASELINE = "batch"

    epsilon: float = option(1e-6, gt=0)
    """Added to the standard deviation, in units of reward."""

    def __call__(self, batch: TokenBatch) -> Terms:
        return batch.of_samples(normalised(batch.step.rewards, batch.step.valid, self.epsilon)), {}
