"""metrics is the lowest layer: importing it brings neither torch nor the rest of the library."""

from __future__ import annotations

import os
import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
import megatron_rl.metrics as package
for module in pkgutil.iter_modules(package.__path__):
    if module.name == "hf_evaluate":  # the adapter to a heavy library, imported by who asks for it
        continue
    importlib.import_module(f"megatron_rl.metrics.{module.name}")
layers = ("metrics", "types", "sampling", "errors", "arithmetic", "signals", "atomic", "json_text", "user_files")
allowed = tuple(f"megatron_rl.{layer}" for layer in layers)
wrong = [name for name in sys.modules if name.startswith("megatron_rl.") and not name.startswith(allowed)]
wrong += [name for name in ("torch", "wandb", "tensorboard", "megatron") if name in sys.modules]
sys.exit(f"imported {wrong}" if wrong else 0)
"""


def test_import_is_light() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IMPORT_ALL]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
