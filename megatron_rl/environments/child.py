"""Child processes for author's code: how they start and what they can import, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

LOAD_SECONDS = 300.0
"""Default deadline for an import, a set-up or a split's tasks. The published DAPO-Math-17k takes half a minute, after
its download."""
HARNESS_PROCESSES = 64
"""Default number of samples of harnesses that run at once on a node; most of them wait for the model."""
CHILDREN = "/proc/self/task/{}/children"
"""Of a process with one thread; kernels built without CONFIG_PROC_CHILDREN have no such file."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def start_child(module: str, environment: Mapping[str, str], **streams: Any) -> tuple[subprocess.Popen, Connection]:
    """A process that runs ``module``, which finds its ``parent_channel``, and the other end of that channel."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**environment, **importable()},
            # Ctrl-C and a launcher's SIGTERM are for the trainer; and what the child starts is killed with it
            start_new_session=True,
            **streams,
        )
    return process, ours


def parent_channel() -> Connection:
    """In a child: the channel that it was started with."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def importable() -> dict[str, str]:
    """The variable with which a child imports what this process can, wherever it was started from."""
    return {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as the thread of ``parent`` that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """What descendants of this process leave behind becomes its child, and not that of the machine's first process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans(known: Collection[int]) -> None:
    """Kills the children of this process that are not ``known``, with their descendants: a killed worker's browser or
    daemon, which has a process group of its own. For a process that adopts orphans."""
    while orphans := [pid for pid in _children() if pid not in known]:
        for pid in orphans:
            kill_group(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """psutil reads the status of every process of the machine, 2 ms for each hundred, and this is asked for every
    sample of a harness."""
    try:
        return [int(pid) for pid in Path(CHILDREN.format(os.getpid())).read_text().split()]
    except FileNotFoundError:
        return [child.pid for child in psutil.Process().children()]


def kill_group(pid: int) -> None:
    """Kills the process with what it started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
