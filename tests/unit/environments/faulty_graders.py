"""An environment whose grader does what the completion tells it, in a worker process of the tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable

from megatron_rl.environments.base import Environment
from megatron_rl.types import Grade, Task


def _hang() -> None:
    time.sleep(600)


def _spin() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1)


def _memory() -> None:
    _ = bytearray(64 * 2**30)


def _write() -> None:
    with tempfile.TemporaryFile("w", encoding="utf-8", dir="/tmp") as file:
        file.write("x")


def _say(text: bytes) -> None:
    """Answers the pool in the worker's place."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), struct.pack("!i", len(text)) + text)
    _hang()


FAULTS: dict[str, Callable[[], object]] = {
    "hang": _hang,
    "spin": _spin,
    "segv": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": _memory,
    "exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(7),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "recursion": lambda: _recurse(0),
    "write": _write,
    "say_null": lambda: _say(b"null"),
    "say_nothing": lambda: _say(b"[]"),
    "say_two": lambda: _say(b"[{}, {}]"),
}


def _recurse(depth: int) -> int:
    return 1 + _recurse(depth + 1)


class Faulty(Environment):
    """The completion names the fault; with ``once:`` only where the task's folder does not exist yet."""

    name = "faulty"
    reward_range = (-1.0, 1.0)

    def __init__(self, *, bonus: float = 0.0) -> None:
        self._bonus = bonus

    def tasks(self, split):
        yield Task(f"{split}-0", "?")

    def grade(self, task, transcript):
        text = transcript.text
        if text.startswith("once:"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(task.data["mark"])
                FAULTS[text.removeprefix("once:")]()
        elif text in FAULTS:
            FAULTS[text]()
        elif text == "environ":
            return Grade(0.0, status=",".join(sorted(os.environ)), extracted=os.environ["CUDA_VISIBLE_DEVICES"])
        elif text == "stdin":
            return Grade(float(len(sys.stdin.read())))
        elif text == "pid":
            return float(os.getpid())
        elif text == "sympy":
            return float(text in sys.modules)
        return Grade(float(len(text)) + self._bonus, status="correct", extracted=text)


class Mathematical(Faulty):
    """Graded by ``math``, as its attribute says."""

    grader = "math"
