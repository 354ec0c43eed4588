#!/usr/bin/env python
"""Train a language model by RL, or supervised, in one Megatron process per rank.

    torchrun --nproc-per-node=2 train_rl.py --perform-rl-step --langrl-env-config ENVIRONMENTS.yaml ...

``--help`` lists the common flags, ``--check`` validates everything without building a model.
"""

from __future__ import annotations

import sys

from megatron_rl.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
