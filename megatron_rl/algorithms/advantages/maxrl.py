"""MaxRL: reward normalised by the mean of its group, towards maximum likelihood (arXiv 2602.02710).

With rewards 0 and 1 and a success rate p a task is weighted by 1 / p, like the gradient of log p: rarely solved tasks
most. The paper's sum over tokens is ``--rl-loss-aggregation constant``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.groups import group_statistics
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``(r - mean) / (mean - lowest + epsilon)`` over the valid samples of the group."""

    BY_TURN = False

    epsilon: float = option(1e-6, gt=0)
    """Avoids division by 0 in groups without a success; in units of reward."""
    lowest: float = option(0.0)
    """Reward of a failure; 0 in the paper."""

    @property
    def lowest_reward(self) -> float:
        """Environments that declare lower rewards are refused before the run."""
        return self.lowest

    def __call__(self, batch: TokenBatch) -> Terms:
        """Raises ``ConfigError`` for a reward below ``lowest``: a negative mean would invert every sign."""
        known = batch.step.rewards[batch.step.valid]
        if (known < self.lowest).any():  # in fp32, in which a reward of -0.1 is below the fp64 number
            raise ConfigError([
                f"--rl-advantage maxrl divides by the mean reward above that of a failure, lowest={self.lowest:g}, "
                f"but there is a reward of {float(known.min()):g}; use --rl-advantage-args lowest=R, R being the lowest"
            ])
        group = group_statistics(batch.step)
        return batch.of_samples(group.centred / (group.mean - self.lowest + self.epsilon)), {}
