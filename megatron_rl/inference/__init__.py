"""Generation on the training model itself, in place."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
