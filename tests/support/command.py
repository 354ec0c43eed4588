"""The ``megatron-rl`` command as a script for `tests.support.runs.run_many`."""

from megatron_rl.cli import main

__all__ = ["main"]
