"""From graded groups to an updated policy."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.supervised import SupervisedTrainer

__all__ = ["Optimization", "PolicyTrainer", "SupervisedTrainer"]
