"""Reinforcement learning of language models inside one Megatron process per GPU.

`megatron_rl.train`, `evaluate` and `generate` are the commands of those names, see `megatron_rl.api`.
"""

__version__ = "0.1.0"

import importlib
from typing import Any

from megatron_rl.arithmetic import ask_for_strict_products

_API = ("evaluate", "generate", "train", "Summary")


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is used: `import megatron_rl` stays quick."""
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_rl.api"), name)


ask_for_strict_products()  # before the first product of this process
