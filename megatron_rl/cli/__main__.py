"""``python -m megatron_rl.cli`` is ``megatron-rl``."""

from megatron_rl.cli import entry

entry()
