"""What a process for author's code may use: an empty environment, bounded memory, time and descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from dataclasses import dataclass

LOAD_SECONDS = 300.0
"""Default deadline for an import, a set-up or a split's tasks. The published DAPO-Math-17k takes half a minute, after
its download."""
WORKER_MARK = "MEGATRON_RL_GRADING_WORKER"
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Limits:
    """Bounds of one worker process."""

    memory_mb: int = 4096
    """Address space, which is several times the memory in use: sympy alone maps 300 MB."""
    open_files: int = 64

    def apply(self) -> None:
        """Binds this process to them, for good."""
        bounds = {
            resource.RLIMIT_AS: self.memory_mb * 2**20,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
        }
        for kind, bound in bounds.items():
            resource.setrlimit(kind, (bound, bound))


def importable() -> dict[str, str]:
    """The variable with which a child imports what this process can, wherever it was started from."""
    return {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}


def worker_environment() -> dict[str, str]:
    """The variables a worker gets: a grader that reads its environment finds no token and no GPU."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    fixed = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""}
    return kept | importable() | fixed | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", WORKER_MARK: "1"}


def in_worker() -> bool:
    """Whether this process is a worker of a pool, which may be killed at any time."""
    return os.environ.get(WORKER_MARK) == "1"


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as the thread of ``parent`` that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def kill_group(pid: int) -> None:
    """Kills the process with what it started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
