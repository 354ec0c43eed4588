"""A writer behind a thread: whatever it does, the training loop never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from megatron_rl.metrics.writer import MetricWriter

logger = logging.getLogger(__name__)

_Row = tuple[int, dict[str, float]]


class BackgroundWriter:
    """Opens and feeds a slow writer from a daemon thread, over a bounded queue that drops when full.

    Opening may hang for ever (a login prompt, a proxy that swallows packets): after ``open_timeout_s`` the
    writer is given up with one warning. Being a daemon, the thread does not hold the process at exit.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], MetricWriter],
        *,
        queue_size: int = 1000,
        open_timeout_s: float = 90.0,
        close_timeout_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.dropped = 0
        """Rows that did not fit in the queue."""
        self._open_writer = open_writer
        self._open_timeout_s = open_timeout_s
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._started = clock()
        self._rows: queue.Queue[_Row | None] = queue.Queue(queue_size)
        self._opened = threading.Event()
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step; returns at once."""
        if self._off.is_set() or self._gave_up_opening():
            return
        try:
            self._rows.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("%s cannot keep up; dropping rows from step %d on", self.name, step)

    def close(self) -> None:
        """Let the queue drain for at most ``close_timeout_s``, then leave the thread behind."""
        if not self._off.is_set():
            deadline = self._clock() + self._close_timeout_s
            try:
                self._rows.put(None, timeout=self._close_timeout_s)
            except queue.Full:
                self._off.set()
            self._thread.join(max(0.0, deadline - self._clock()))
            if self._thread.is_alive():
                self._off.set()
                logger.warning("%s did not finish in %.0f s; left behind", self.name, self._close_timeout_s)
        if self.dropped:
            logger.warning("%s dropped %d steps; metrics.jsonl has them all", self.name, self.dropped)

    def _gave_up_opening(self) -> bool:
        if self._opened.is_set() or self._clock() - self._started < self._open_timeout_s:
            return False
        self._off.set()
        logger.warning("%s did not start in %.0f s and is off", self.name, self._open_timeout_s)
        return True

    def _run(self) -> None:
        """The thread: any failure switches this writer off, with one warning."""
        try:
            writer = self._open_writer()
            self._opened.set()
            while not self._off.is_set():
                row = self._rows.get()
                if row is None:
                    break
                writer.write(*row)
            writer.close()
        except Exception as error:  # noqa: BLE001  (a third-party client may raise anything)
            if not self._off.is_set():
                logger.warning("%s is off: %s: %s", self.name, type(error).__name__, error)
            self._off.set()
