"""A watchdog over the main thread: it reports where that waits, and ends a job that does not go on.

A rank that is stopped, or waits for one that is, waits in one place: in a collective, or where the host reads what a
GPU has computed. Every rank watches itself, so the log has a line of each that waits; the one without is the cause.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parent
_MAIN = str(_PACKAGE / "main.py")
_DECORATOR = "wrapper"
"""What torch calls the one around its collectives."""
_LOOKS = 100
"""Looks within the limit."""
_LONGEST_PAUSE_S = 5.0

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks at a thread every few seconds; if it stays where it is, warns, then ends the process."""

    def __init__(
        self, limit_s: float, signs: Callable[[], object], end: Callable[[str], None], thread: int | None = None
    ) -> None:
        """``signs`` returns something else whenever the thread has got on, also if it came back to the same place;
        ``end`` gets the last message. Watches the calling thread, or the one with the ident ``thread``."""
        self._limit_s = limit_s
        self._signs = signs
        self._end = end
        self._thread = threading.get_ident() if thread is None else thread
        self._seen: object = None
        self._still_s = 0.0
        self._warned = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the body."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def look(self, seconds: float) -> None:
        """Take one look, ``seconds`` after the one before."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return
        seen = (self._signs(), _place(frame))
        if seen != self._seen:
            self._seen, self._still_s, self._warned = seen, 0.0, False
            return
        self._still_s += seconds
        what = f"no progress for {self._still_s:.0f} s in {describe(traceback.extract_stack(frame))}"
        limit = f"{self._limit_s:.0f} s (--distributed-timeout-minutes)"
        if self._still_s >= self._limit_s:
            stack = "".join(traceback.format_stack(frame))
            logger.error("%s, the limit is %s: ending the job. The main thread:\n%s", what, limit, stack)
            self._end(what)
        elif self._still_s >= self._limit_s / 2 and not self._warned:
            self._warned = True
            logger.warning("%s; the job is ended after %s", what, limit)

    def _watch(self, done: threading.Event) -> None:
        pause = min(self._limit_s / _LOOKS, _LONGEST_PAUSE_S)
        before = time.monotonic()
        while not done.wait(pause):
            now = time.monotonic()
            # A process that was stopped and goes on has not been waiting meanwhile.
            self.look(min(now - before, 2 * pause))
            before = now


def describe(stack: traceback.StackSummary) -> str:
    """Describe a stack, innermost first: ``all_reduce < max_over (parallel/collectives.py:34) < ... < train (...)``.

    Of other libraries' functions the two innermost: of pipeline stages the second says whom it waits for.
    """
    ours = next((depth for depth, entry in enumerate(reversed(stack)) if _is_ours(entry.filename)), len(stack))
    others = [entry.name for entry in reversed(stack[len(stack) - ours :]) if entry.name != _DECORATOR]
    parts = others[:2]
    for entry in reversed(stack):
        if _is_ours(entry.filename) and entry.filename != _MAIN:
            parts.append(f"{entry.name} ({Path(entry.filename).relative_to(_PACKAGE)}:{entry.lineno})")
    return " < ".join(parts)


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(_PACKAGE)


def _place(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """Every frame of the stack and the instruction it is at; no frame is kept, for it would keep tensors alive."""
    place = []
    while frame is not None:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(place)
