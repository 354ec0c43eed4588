"""From flags to the settings of loss and correction.

Each raises ``ConfigError`` for values that make no sense, so that they are found before a model is built.
"""

from __future__ import annotations

from megatron_rl.algorithms.interfaces import CorrectionConfig, LossConfig
from megatron_rl.config import RLConfig


def loss_config(config: RLConfig) -> LossConfig:
    """Of `--rl-policy-loss`."""
    algorithm = config.algorithm
    return LossConfig(
        clamp_eps_lower=algorithm.grpo_clamp_eps_lower,
        clamp_eps_upper=algorithm.grpo_clamp_eps_upper,
        dual_clip=algorithm.rl_dual_clip,
    )


def correction_config(config: RLConfig) -> CorrectionConfig:
    """Of `--rl-correction`."""
    algorithm = config.algorithm
    return CorrectionConfig(
        cap=algorithm.rl_correction_cap,
        lower=algorithm.rl_correction_lower,
        upper=algorithm.rl_correction_upper,
        veto=algorithm.rl_correction_veto,
    )
