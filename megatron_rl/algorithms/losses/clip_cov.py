"""Clip-Cov: no gradient for a few tokens whose log-prob and advantage vary together (arXiv 2505.22617).

Such tokens carry most of the loss of entropy: the change of the entropy is minus that covariance.
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
    """``clip``, and 0 at the tokens picked: ``share`` of the update's, at random of those within the bounds.

    They stay in the denominator. The authors' code leaves tokens that the ratio clips out of the draw; drawn here, such
    a token loses nothing.
    """

    clamp_eps_lower: float = option(0.2, gt=0, le=1)
    """See ``clip``."""
    clamp_eps_upper: float = option(0.2, gt=0)
    """See ``clip``."""
    lower: float = option(1.0)
    """Only tokens whose covariance is above this are picked."""
    upper: float = option(5.0)
    """Only tokens whose covariance is below this are picked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lower >= self.upper:
            raise ConfigError([f"lower={self.lower:g} is not below upper={self.upper:g}; no token could be picked"])

    def priority(self, batch: TokenBatch, covariance: Tensor) -> Tensor:
        """See ``TokenSelection``: random numbers of each token, other ones after every update."""
        within = (covariance > self.lower) & (covariance < self.upper)
        return torch.where(within, uniform(batch.versions, places(batch)).double(), -math.inf)

    def __call__(self, batch: TokenBatch) -> Terms:
        """See ``Extension``."""
        loss, sums = super().__call__(batch)
        if batch.picked is None:
            return loss, sums
        return torch.where(batch.picked, 0.0, loss), sums | {"actor/picked_tokens": batch.picked}
