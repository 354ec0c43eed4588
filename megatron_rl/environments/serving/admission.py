"""Who may work, who may wait, and who is told to come back: no queue of the server grows without bound."""

from __future__ import annotations

import threading

WORKING = 8
"""Requests that are read or graded at once: enough to keep the workers busy, and few, because one whose samples wait
behind many that hang runs into its client's timeout."""
WAITING = 128
"""Sixteen from each rank of a node; a thread that waits is cheap."""
PATIENCE_SECONDS = 1.0
"""Longest wait for a place; after it the client waits, which costs the server nothing."""


class Admission:
    """A bounded number of places, and a bounded number of threads that wait for one."""

    def __init__(
        self, working: int = WORKING, waiting: int = WAITING, patience_s: float = PATIENCE_SECONDS
    ) -> None:
        self._places = threading.BoundedSemaphore(working)
        self._queue = threading.BoundedSemaphore(waiting)
        self._patience_s = patience_s
        self._closed = threading.Event()

    @property
    def closed(self) -> bool:
        """Whether the server is about to end."""
        return self._closed.is_set()

    def close(self) -> None:
        """From now on requests are told that the server is closing."""
        self._closed.set()

    def enter(self) -> bool:
        """Takes a place, waiting a little for one; False when there is none. A True wants a ``leave``."""
        if self._places.acquire(blocking=False):
            return True
        if not self._queue.acquire(blocking=False):
            return False
        try:
            return self._places.acquire(timeout=self._patience_s)
        finally:
            self._queue.release()

    def leave(self) -> None:
        """Gives the place back."""
        self._places.release()
