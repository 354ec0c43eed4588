"""Reinforcement learning of language models inside one Megatron process per GPU.

`megatron_rl.train`, `evaluate` and `generate` are the commands of those names, `steps` is a loop over the steps of a
run (`megatron_rl.api`), and `Callback` what a run calls on the way (`megatron_rl.callbacks`).
"""

__version__ = "0.1.0"

import importlib
from typing import Any

from megatron_rl.arithmetic import ask_for_strict_products

_API = dict.fromkeys(("evaluate", "generate", "steps", "train", "Step", "Summary"), "megatron_rl.api")
_API |= dict.fromkeys(("Callback", "RunControl"), "megatron_rl.callbacks")


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is used: `import megatron_rl` stays quick."""
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_API[name]), name)


ask_for_strict_products()  # before the first product of this process
