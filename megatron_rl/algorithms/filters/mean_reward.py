"""Keeps groups with a mean reward within bounds: tasks that are neither too easy nor too hard.

Source: PRIME (arXiv 2502.01456), online prompt filtering, there with accuracies from 0.2 to 0.8.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rl.algorithms import GroupFilter, option
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Filter(GroupFilter):
    """Passes groups with ``low <= mean <= high`` whose rewards are not all equal."""

    low: float = option(0.2)
    """Lowest mean reward that counts."""
    high: float = option(0.8)
    """Highest mean reward that counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError([f"low={self.low:g} is above high={self.high:g}: no group would count; swap them"])

    def __call__(self, rewards: Tensor) -> bool:
        if not rewards.numel() or not rewards.max() > rewards.min():
            return False
        return self.low <= float(rewards.double().mean()) <= self.high
