"""What each rank runs that `megatron_rl.cli.launch` has started: ``python -m megatron_rl.cli.rank FLAGS``."""

from __future__ import annotations

import os
import shlex
import sys

from megatron_rl.main import main
from megatron_rl.signals import TYPED_COMMAND

if __name__ == "__main__":
    sys.exit(main(["megatron-rl", *sys.argv[1:]], shlex.split(os.environ[TYPED_COMMAND])))
