"""The `megatron-rl` command: what `train_rl.py` does, by name.

    megatron-rl estimate FLAGS      bytes by phase, and nothing is started
    torchrun --nproc-per-node=RANKS -m megatron_rl.cli train FLAGS
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_rl.main import CONFIGURATION_ERROR
from megatron_rl.main import main as run_flags

_USAGE = """usage: megatron-rl {estimate,train} FLAGS

  estimate  print the bytes that the run of these flags takes on each rank, by phase
  train     run it; on several ranks: torchrun --nproc-per-node=RANKS -m megatron_rl.cli train FLAGS

FLAGS are those of train_rl.py: megatron-rl train --help lists them.
"""
_FLAGS = {"estimate": ["--estimate"], "train": []}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the sub-command, see ``megatron_rl.main.main``; 2 if there is none."""
    command, *flags = [*(sys.argv[1:] if argv is None else argv)] or [""]
    if command in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if command not in _FLAGS:
        sys.stderr.write(_USAGE)
        return CONFIGURATION_ERROR
    return run_flags([f"megatron-rl {command}", *flags, *_FLAGS[command]])


if __name__ == "__main__":
    sys.exit(main())
