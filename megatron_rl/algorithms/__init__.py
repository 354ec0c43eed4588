"""Advantages, losses, corrections, group filters, KL and log-probs; exports the names that extensions need."""

from megatron_rl.algorithms.batch import LossInputs, StepRewards, Terms, TokenBatch, log_ratio
from megatron_rl.algorithms.extension import CLIPPED, Extension, GroupFilter
from megatron_rl.config.flags import flag as option

__all__ = [
    "CLIPPED", "Extension", "GroupFilter", "LossInputs", "StepRewards", "Terms", "TokenBatch", "log_ratio", "option",
]  # fmt: skip
