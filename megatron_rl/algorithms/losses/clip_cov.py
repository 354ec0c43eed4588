"""Clip-Cov: no gradient for a few tokens with a high covariance of log-prob and advantage (arXiv 2505.22617).

Such tokens cause most of the entropy loss: the entropy changes by minus that covariance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import Terms, TokenBatch, option
from megatron_rl.algorithms.covariance import TokenSelection, places
from megatron_rl.algorithms.losses import clip
from megatron_rl.arithmetic import uniform
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Loss(TokenSelection, clip.Loss):
    """``clip``, but 0 at randomly picked tokens: ``share`` of the update's tokens, with a covariance within the bounds.

    They stay in the denominator. The authors' code excludes clipped tokens from the draw; here they may be drawn, to no
    effect.
    """

    clamp_eps_lower: float = option(0.2, gt=0, le=1)
    clamp_eps_upper: float = option(0.2, gt=0)
    lower: float = option(1.0)
    """Only tokens with a covariance above this are picked."""
    upper: float = option(5.0)
    """Only tokens with a covariance below this are picked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lower >= self.upper:
            raise ConfigError([f"lower={self.lower:g} is not below upper={self.upper:g}; no token could be picked"])

    def priority(self, batch: TokenBatch, covariance: Tensor) -> Tensor:
        """Return random numbers per token, new ones after every update; see ``TokenSelection``."""
        within = (covariance > self.lower) & (covariance < self.upper)
        return torch.where(within, uniform(batch.versions, places(batch)).double(), -math.inf)

    def __call__(self, batch: TokenBatch) -> Terms:
        loss, sums = super().__call__(batch)
        if batch.selected is None:
            return loss, sums
        return torch.where(batch.selected, 0.0, loss), sums | {"actor/picked_tokens": batch.selected}
