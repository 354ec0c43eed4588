"""What `megatron_rl.cli.launch` starts: ``python -m megatron_rl.cli.rank LAUNCHER MODULE:FUNCTION WORDS``."""

from __future__ import annotations

import importlib
import signal
import sys

from megatron_rl.environments.child import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # before the imports that take seconds
    module, function = sys.argv[2].split(":")
    code = getattr(importlib.import_module(module), function)(sys.argv[3:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late: see `megatron_rl.cli.entry`
    sys.exit(code)
