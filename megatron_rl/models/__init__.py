"""megatron-core's GPTModel, built from the user's flags."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
