"""Where megatron-core's writers tell what they have written."""

from __future__ import annotations

import os
import queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


class ResultQueue:
    """Hands over what this process or a fork of it has put, through a file in memory that both hold open.

    megatron's own queue is a third process. It imports torch to pass on the first result, which takes seconds and
    200 MB, and it lives on when its parent is killed. A pipe would block its writer after 64 KiB.
    """

    def __init__(self) -> None:
        self._file = open(os.memfd_create("written"), "r+b", buffering=0)  # noqa: SIM115

    def put(self, results: Any) -> None:
        """Replaces what nobody has taken: of a save that was given up.

        Raises:
            OSError: it could be written in part only; then nothing was put.
        """
        self._file.seek(0)
        self._file.truncate()
        rest = memoryview(ForkingPickler.dumps(results))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(0)
            raise

    def get_nowait(self) -> Any:
        """Takes what was put last.

        Raises:
            queue.Empty: nothing was, or it was taken before.
        """
        self._file.seek(0)
        written = self._file.read()
        if not written:
            raise queue.Empty
        self._file.truncate(0)
        return ForkingPickler.loads(written)


def prepare_result_queue() -> None:
    """Makes megatron use a `ResultQueue` in this process."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = ResultQueue()
