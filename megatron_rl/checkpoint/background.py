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

from megatron_rl.checkpoint.attempt import SaveAttempt


class BackgroundSave:
    """One save under way; every rank has one and makes the same calls."""

    def __init__(self, request: AsyncRequest, attempt: SaveAttempt, commit: Callable[[], None] | None) -> None:
        """Forks the writer. ``commit`` is called in a thread when all ranks' files are there, by rank 0 alone."""
        self._queue = AsyncCallsQueue()
        self._queue.schedule_async_request(request)
        self._attempt = attempt
        self._commit = commit
        self._thread: threading.Thread | None = None
        self._written = False

    def poll(self) -> None:
        """Goes on with it as far as that needs no waiting; collective while files are written.

        Raises:
            SaveError: on every rank; they could not be written.
        """
        self._go_on(wait=False)

    def finish(self) -> None:
        """Waits until the checkpoint counts; collective.

        Raises:
            SaveError: on every rank; it could not be written.
        """
        self._go_on(wait=True)
        if self._thread is not None:
            self._thread.join()
        self._attempt.agree()

    def abandon(self) -> None:
        """Ends the writer; what it wrote never counts. For a run that ends by an error."""
        if self._thread is not None:
            self._thread.join()
        for call in self._queue.async_calls:
            writer = call.async_caller.process  # megatron's own close(abort=True) leaves these running
            if writer is not None:
                writer.kill()
                writer.join()

    def _go_on(self, wait: bool) -> None:
        if self._written:
            return
        with self._attempt.collective_part():
            self._queue.maybe_finalize_async_calls(blocking=wait)
        if self._queue.get_num_unfinalized_calls():
            return
        self._attempt.agree()
        self._begin_to_commit()

    def _begin_to_commit(self) -> None:
        self._written = True
        if self._commit is not None:
            self._thread = threading.Thread(target=self._run_commit, name="commit checkpoint")
            self._thread.start()

    def _run_commit(self) -> None:
        with self._attempt.part():
            self._commit()
