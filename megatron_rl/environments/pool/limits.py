"""What a worker may use: an empty environment, bounded memory, time and descriptors, no file to write to."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from dataclasses import dataclass

WORKER_MARK = "MEGATRON_RL_GRADING_WORKER"
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Limits:
    """Bounds of one worker process."""

    memory_mb: int = 4096
    """Address space, which is several times the memory in use: sympy alone maps 300 MB."""
    open_files: int = 64


def worker_environment() -> dict[str, str]:
    """The variables a worker gets: a grader that reads its environment finds no token and no GPU."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    return kept | {
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nonexistent",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        WORKER_MARK: "1",
    }


def in_worker() -> bool:
    """Whether this process is a worker of a pool, which may be killed at any time."""
    return os.environ.get(WORKER_MARK) == "1"


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as ``parent`` ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def apply(limits: Limits) -> None:
    """Binds this process to ``limits``, for good."""
    memory = limits.memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_cpu_seconds(seconds: float) -> None:
    """SIGXCPU after so much more processor time: the second guard, should the first process be stopped."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    ceiling = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (ceiling, resource.RLIM_INFINITY))
