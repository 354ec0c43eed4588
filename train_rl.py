#!/usr/bin/env python
"""Train a language model by RL, or supervised, in one Megatron process per rank.

    torchrun --nproc-per-node=2 train_rl.py --perform-rl-step --langrl-env-config ENVIRONMENTS.yaml ...

``--help`` lists the common flags, ``--check`` validates everything without building a model.
"""

from __future__ import annotations

import sys

from megatron_rl.main import main
from megatron_rl.signals import with_streams

if __name__ == "__main__":
    sys.exit(with_streams(main)(sys.argv))
