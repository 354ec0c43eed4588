"""The queue over which megatron-core's writers tell what they have written."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.managers import SyncManager

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_rl.environments.pool.limits import die_with_parent


def prepare_result_queue() -> None:
    """Make the queue, in a process that ends with this one.

    megatron's own holds some 200 MB and lives on when its parent is killed, once for every kill.
    """
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=get_context("spawn"))
        manager.start(die_with_parent, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()  # the proxy keeps the manager
