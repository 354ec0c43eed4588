"""RLOO: reward minus the mean of the other samples of its group (arXiv 2402.14740).

A baseline that leaves the sample out is independent of it, so the gradient estimate is unbiased.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import group_statistics
from megatron_rl.algorithms.interfaces import AdvantageConfig, Baseline

BASELINE: Baseline = "group"


def compute(rewards: Tensor, valid: Tensor, group_index: Tensor, config: AdvantageConfig) -> Tensor:
    """``r - (sum - r) / (n - 1)``, which is ``(r - mean) n / (n - 1)``, over the group's n valid samples.

    Args and result as in ``interfaces.AdvantageMethod``: [B] -> [B] fp32, 0 where there is no baseline.
    """
    del config  # has no settings; the signature is that of every advantage
    group = group_statistics(rewards, valid, group_index)
    return (group.centred * group.count / (group.count - 1).clamp_min(1)).float()
