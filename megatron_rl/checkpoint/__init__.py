"""Save, load and resume."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
