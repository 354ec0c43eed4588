"""megatron-core's GPTModel, built from the user's flags."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
from megatron_rl.models.gpt import PolicyModel, build_model, build_transformer_config, rollout_mode
from megatron_rl.models.rollout import RolloutForward
from megatron_rl.models.rollout_ops import RolloutOps
from megatron_rl.models.routing import BalanceLosses

__all__ = [
    "BalanceLosses", "PolicyModel", "RolloutForward", "RolloutOps", "build_model", "build_transformer_config",
    "rollout_mode",
]  # fmt: skip
