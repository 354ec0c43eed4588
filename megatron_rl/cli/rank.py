"""What `megatron_rl.cli.launch` starts: ``python -m megatron_rl.cli.rank MODULE:FUNCTION WORDS``."""

from __future__ import annotations

import importlib
import signal
import sys

if __name__ == "__main__":
    module, function = sys.argv[1].split(":")
    code = getattr(importlib.import_module(module), function)(sys.argv[2:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late: see `megatron_rl.cli.entry`
    sys.exit(code)
