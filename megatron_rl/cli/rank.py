"""What `megatron_rl.cli.launch` starts: ``python -m megatron_rl.cli.rank MODULE:FUNCTION WORDS``."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    module, function = sys.argv[1].split(":")
    sys.exit(getattr(importlib.import_module(module), function)(sys.argv[2:]))
