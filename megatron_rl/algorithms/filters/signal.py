"""Keeps groups with different rewards: without variance there is no gradient.

Source: DAPO, dynamic sampling (arXiv 2503.14476, section 3.2), there with accuracies: see ``accuracy``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rl.algorithms import GroupFilter


@dataclass(frozen=True, kw_only=True)
class Filter(GroupFilter):
    """Passes groups whose rewards are not all equal."""

    def __call__(self, rewards: Tensor) -> bool:
        return rewards.numel() > 0 and bool(rewards.max() > rewards.min())
