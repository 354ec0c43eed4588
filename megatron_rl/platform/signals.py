"""Ctrl-C, SIGTERM and a closed terminal ask the run to stop; the loop decides when."""

from __future__ import annotations

import signal
import time
from types import FrameType

_SECOND_PRESS_AFTER_S = 1.0


class StopRequest:
    """Set by a signal, read between units of work. One per process, installed by `install`."""

    def __init__(self) -> None:
        self.reason = ""
        self._first = 0.0

    @property
    def requested(self) -> bool:
        """True once somebody asked this process to stop."""
        return bool(self.reason)

    @property
    def seconds(self) -> float:
        """Since the request; 0 while there is none."""
        return time.monotonic() - self._first if self.requested else 0.0

    def install(self) -> StopRequest:
        """Catch SIGINT, SIGTERM and, unless ``nohup`` ignores it, SIGHUP from now on."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # torchrun repeats a Ctrl-C as SIGTERM at once; only a second press means "now".
        pressed_again = number == signal.SIGINT and time.monotonic() - self._first > _SECOND_PRESS_AFTER_S
        if self.requested and pressed_again:
            raise KeyboardInterrupt
        if not self.requested:
            self._first = time.monotonic()
            self.reason = signal.Signals(number).name
