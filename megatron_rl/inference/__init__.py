"""Generation on the training model itself, in place."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
from megatron_rl.inference.engine import Engine, EngineOptions, EngineStatistics
from megatron_rl.inference.rollout_engine import RolloutEngine

__all__ = ["Engine", "EngineOptions", "EngineStatistics", "RolloutEngine"]
