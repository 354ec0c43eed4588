"""GSPO-token: the ratio of the whole sequence, the advantage and the gradient of each token (arXiv 2507.18071, eq. 13).

`gspo` computes it so already, being the same where a sequence has one advantage. This is its name where tokens have
advantages of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import option
from megatron_rl.algorithms.losses import gspo


@dataclass(frozen=True, kw_only=True)
class Loss(gspo.Loss):
    """See ``gspo``."""

    AGGREGATION = "sequence-mean"

    clamp_eps_lower: float = option(3e-4, gt=0, le=1)
    clamp_eps_upper: float = option(4e-4, gt=0)
