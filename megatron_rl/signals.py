"""Ctrl-C, SIGTERM and a closed terminal: they end a start at once, and ask a run to stop when it is ready to.

Beside them, streams that are closed: from the start, or by the program that reads them.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SECOND_PRESS_AFTER_S = 1.0
_PEERS_NOTICE_S = 0.3
"""The launcher signals one rank after the other: one that ended at once would be a lost connection to the next."""

TYPED_COMMAND = "MEGATRON_RL_COMMAND"
"""Environment variable by which ranks know that `megatron-rl` starts them."""
TORCHRUN_AND_SIGNALS = "ends with exit code 1 and a traceback of its own: nothing is wrong"

logger = logging.getLogger(__name__)


def with_streams(main: Callable[..., int]) -> Callable[..., int]:
    """Make the ``main`` of a program end with a line where nobody reads its output, as of ``| head -1`` or ``>&-``."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> int:
        closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
        for name in closed:  # the lowest number is free, and would be that of the next file that is opened
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        if "stdout" in closed:
            sys.stderr.write("standard output is closed; send it somewhere, for example > /dev/null\n")
            return 2
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if not poll.poll(0):  # another pipe, or a socket
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered
            sys.stderr.write("what reads the output has ended, so this ends, too; let it read all, or use a file\n")
            return 1

    return run


class StopRequest:
    """Set by a signal or by `ask`, read between units of work. One per process."""

    def __init__(self) -> None:
        self.reason = ""
        self.looks = 0
        """How often somebody asked whether to stop: it goes up while the run moves on."""
        self._first = 0.0
        self._wakeup: int | None = None

    @property
    def requested(self) -> bool:
        """True once somebody asked this process to stop."""
        self.looks += 1
        return bool(self.reason)

    @property
    def seconds(self) -> float:
        """Since the request; 0 while there is none."""
        return time.monotonic() - self._first if self.reason else 0.0

    def install(self) -> StopRequest:
        """Start to `catch` signals.

        Until `started` is called a signal ends the process, with status 0, as there is nothing to save. A thread does
        so: the main thread may be inside a rendezvous or a collective, where Python's handlers do not run.
        """
        reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self.started)  # a signal to a forked child is none to this process
        threading.Thread(target=_end_at_signal, args=(reader,), daemon=True).start()
        self.catch()
        return self

    def catch(self) -> None:
        """Take SIGINT, SIGTERM and, unless ``nohup`` ignores it, SIGHUP as requests from now on."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._handle)

    def ask(self, reason: str) -> None:
        """Ask for a stop without a signal; the first reason holds."""
        if not self.reason:
            self._first = time.monotonic()
            self.reason = reason

    def started(self) -> None:
        """Let a signal only ask from now on; the loop decides when to stop. Safe to call again."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup)  # which ends the thread
            self._wakeup = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # torchrun repeats a Ctrl-C as SIGTERM at once; only a second press means "now".
        pressed_again = number == signal.SIGINT and time.monotonic() - self._first > _SECOND_PRESS_AFTER_S
        if self.reason and pressed_again:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)


def by_torchrun() -> bool:
    """Return whether torchrun has started this process, and not `megatron-rl`, which uses torchrun's library."""
    return "TORCHELASTIC_RUN_ID" in os.environ and TYPED_COMMAND not in os.environ


def _end_at_signal(reader: int) -> None:
    """End this process at the first signal; return when the other end of the pipe is closed."""
    with open(reader, "rb", buffering=0) as pipe:
        number = pipe.read(1)
    if number:
        name = signal.Signals(number[0]).name
        logger.info("stopped by %s while it started: there is nothing to save", name)
        if by_torchrun():
            logger.info("torchrun %s", TORCHRUN_AND_SIGNALS)
        time.sleep(_PEERS_NOTICE_S)
        os._exit(0)
