"""``python -m megatron_rl.cli`` is ``megatron-rl``."""

import sys

from megatron_rl.cli import main

sys.exit(main())
