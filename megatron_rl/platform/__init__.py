"""The hardware under the run, and what megatron-core needs to run on it.

Importing this package prepares megatron-core (`prepare`), so every package of ours that imports
megatron imports this one first.
"""

from megatron_rl.platform.device import Platform, current_platform
from megatron_rl.platform.prepare import prepare

prepare()

__all__ = ["Platform", "current_platform", "prepare"]
