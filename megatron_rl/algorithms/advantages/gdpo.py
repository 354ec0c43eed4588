"""GDPO: several rewards, each normalised in its group before they are summed (arXiv 2601.05242).

Summed first, a correct and a well-formed answer can get the same advantage, and the reward with the largest variance
dominates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.groups import group_statistics, normalised
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``S = sum of w (r - group mean) / (group std + epsilon)`` over the rewards; ``(S - mean) / (std + epsilon)``.

    The second mean and std are over the trained samples on all ranks; std with ddof 1.
    """

    BY_TURN = False

    rewards: str = option("reward")
    """Names joined by +: metrics of the environment's grades, or ``reward``, the grade's own."""
    weights: str = option("")
    """Weights of the rewards, joined by +; default 1 each."""
    epsilon: float = option(1e-6, gt=0)
    """Added to the standard deviation, in units of reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.reward_names
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError([f"rewards={self.rewards} must name each reward once; for example rewards=reward+format"])
        try:
            weights = self._weights
        except ValueError:
            weights = (math.nan,)
        if len(weights) != len(names) or not all(math.isfinite(weight) for weight in weights):
            raise ConfigError([
                f"weights={self.weights} must be {len(names)} numbers, one for each of rewards={self.rewards}; for "
                f"example weights={'+'.join(['1'] * len(names))}"
            ])

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Order of the rewards in `StepRewards.parts`."""
        return tuple(self.rewards.split("+"))

    @property
    def _weights(self) -> tuple[float, ...]:
        return tuple(map(float, self.weights.split("+"))) if self.weights else (1.0,) * len(self.reward_names)

    def __call__(self, batch: TokenBatch) -> Terms:
        """Samples that are not trained on get 0."""
        step = batch.step
        parts = step.rewards[:, None] if step.parts is None else step.parts
        total = torch.zeros(step.rewards.numel(), dtype=torch.float64)
        for weight, rewards in zip(self._weights, parts.unbind(1), strict=True):
            group = group_statistics(replace(step, rewards=rewards))
            total += weight * group.centred / (group.std + self.epsilon)
        return batch.of_samples(normalised(total, step.in_loss, self.epsilon)), {}
