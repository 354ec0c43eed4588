"""GSPO-token: sequence-level ratio, token-level advantage and gradient (arXiv 2507.18071, eq. 13).

Identical to `gspo`, which is the same with one advantage per sequence; use this name with token-level advantages.
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
