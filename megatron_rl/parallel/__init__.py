"""Process groups: the only package that asks megatron's ``parallel_state``."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
from megatron_rl.parallel.groups import ParallelGroups, initialize, seed_everything, shut_down

__all__ = ["ParallelGroups", "initialize", "seed_everything", "shut_down"]
