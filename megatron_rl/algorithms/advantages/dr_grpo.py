"""Dr. GRPO: reward minus the group's mean, not divided by its standard deviation (arXiv 2503.20783).

Dividing by the standard deviation gives tasks that are nearly always or nearly never solved more weight.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import group_statistics
from megatron_rl.algorithms.interfaces import AdvantageConfig, Baseline

BASELINE: Baseline = "group"


def compute(rewards: Tensor, valid: Tensor, group_index: Tensor, config: AdvantageConfig) -> Tensor:
    """``r - mean`` over the valid samples of the group.

    Args and result as in ``interfaces.AdvantageMethod``: [B] -> [B] fp32, 0 where there is no baseline.
    """
    del config  # has no settings; the signature is that of every advantage
    return group_statistics(rewards, valid, group_index).centred.float()
