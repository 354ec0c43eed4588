"""Ends the server with the process that started it, so that none is left behind."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time

from megatron_rl.environments.readable import readable

STDIN = 0
POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0


def follow_parent() -> None:
    """Exits on SIGTERM and on the parent's death; call it from the main thread, before any work.

    Ctrl-C reaches every process of a terminal's foreground group, the server too, and would kill it under
    a trainer that wants to finish its step and save. It is ignored, unless the server itself was started
    from a terminal.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    if not os.isatty(STDIN):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = threading.Thread(target=_watch, args=(os.getppid(), _stdin_pipe()), daemon=True)
    watcher.start()


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(0)


def _stdin_pipe() -> int | None:
    """The descriptor of standard input when it is a pipe, whose other end only the parent holds."""
    try:
        return STDIN if stat.S_ISFIFO(os.fstat(STDIN).st_mode) else None
    except OSError:  # closed by whoever started us
        return None


def _watch(parent: int, pipe: int | None) -> None:
    """Both signs are needed: a fork of the parent may keep the pipe open, and the parent may die
    before its id was read."""
    while os.getppid() == parent:
        if pipe is None:
            time.sleep(POLL_SECONDS)
        elif readable(pipe, seconds=POLL_SECONDS) and not os.read(pipe, 1024):
            break
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)  # a grader that never returns must not keep the process
