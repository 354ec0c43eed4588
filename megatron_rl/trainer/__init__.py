"""From graded groups to an updated policy."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
