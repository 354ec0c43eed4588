"""GRPO: reward normalised by mean and standard deviation of its group (DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import group_statistics
from megatron_rl.algorithms.interfaces import AdvantageConfig, Baseline

BASELINE: Baseline = "group"


def compute(rewards: Tensor, valid: Tensor, group_index: Tensor, config: AdvantageConfig) -> Tensor:
    """``(r - mean) / (std + epsilon)`` over the valid samples of the group, std with ddof 1.

    Args and result as in ``interfaces.AdvantageMethod``: [B] -> [B] fp32, 0 where there is no baseline.
    """
    group = group_statistics(rewards, valid, group_index)
    return (group.centred / (group.std + config.epsilon)).float()
