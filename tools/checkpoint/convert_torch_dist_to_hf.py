#!/usr/bin/env python
"""``megatron-rl export``, from a checkout that is not installed.

    python tools/checkpoint/convert_torch_dist_to_hf.py --input-dir RUN_DIR/checkpoints --output-dir NEW_HF_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_rl.cli.export import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
