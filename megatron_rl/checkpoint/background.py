"""A checkpoint that is written while training goes on.

    this process     state ─► fork ───► steps, steps, ... ─► metadata ─► steps ...
    forked writer             └► tensor files, fsync ──┘
    thread (rank 0)                                          └► checksums, rename, latest

The fork holds the weights as they were (tensors of a GPU are copied to the host first), so no step waits for the disk.
Until the rename nothing of it counts: a kill at any moment leaves the checkpoint before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from megatron_rl.errors import CheckpointError
from megatron_rl.parallel.collectives import any_rank


class BackgroundSave:
    """One save under way; every rank has one and makes the same calls."""

    def __init__(self, request: AsyncRequest, commit: Callable[[], None] | None) -> None:
        """Forks the writer. ``commit`` is called in a thread when all ranks' files are there, by rank 0 alone."""
        self._queue = AsyncCallsQueue()
        self._queue.schedule_async_request(request)
        self._commit = commit
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._written = False

    def poll(self) -> None:
        """Goes on with it as far as that needs no waiting; collective while files are written."""
        if not self._written and self._queue.maybe_finalize_async_calls(blocking=False):
            self._begin_to_commit()

    def finish(self) -> None:
        """Waits until the checkpoint counts; collective.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        if not self._written:
            self._queue.maybe_finalize_async_calls(blocking=True)
            self._begin_to_commit()
        if self._thread is not None:
            self._thread.join()
        if any_rank(bool(self._problem)):
            raise CheckpointError(self._problem or "rank 0 could not commit a checkpoint; its log says why")

    def abandon(self) -> None:
        """Ends the writer; what it wrote never counts. For a run that ends by an error."""
        if self._thread is not None:
            self._thread.join()
        for call in self._queue.async_calls:
            writer = call.async_caller.process  # megatron's own close(abort=True) leaves these running
            if writer is not None:
                writer.kill()
                writer.join()

    def _begin_to_commit(self) -> None:
        self._written = True
        if self._commit is not None:
            self._thread = threading.Thread(target=self._run_commit, name="commit checkpoint")
            self._thread.start()

    def _run_commit(self) -> None:
        try:
            self._commit()
        except OSError as error:
            self._problem = f"the checkpoint could not be committed: {error}"
