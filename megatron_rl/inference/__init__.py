"""Generation with the training model's own weights."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
