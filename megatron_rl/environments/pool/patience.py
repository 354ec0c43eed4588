"""Waits for a worker's answer: to the deadline, and longer only for a worker that got no processor to run on.

A plain timeout calls good completions hopeless on an overloaded machine: graders of a few milliseconds were seen
to wait four seconds for a core.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_rl.environments.pool.spawning import Worker
from megatron_rl.environments.readable import readable

LONGEST = 3.0
"""Times the deadline, however little the worker ran."""
FAIR_SHARE = 0.5
"""Of the deadline: who computed for longer had its chance."""


def await_answer(worker: Worker, deadline_s: float) -> None:
    """Returns when there is something to read; ``TimeoutError`` when the worker has used up its time."""
    start, used = time.monotonic(), _processor_seconds(worker.pid)
    while not readable(worker.channel, seconds=deadline_s):
        computed = _processor_seconds(worker.pid) - used
        starved = _runnable(worker.pid) and computed < FAIR_SHARE * deadline_s
        if not starved or time.monotonic() - start >= LONGEST * deadline_s:
            raise TimeoutError


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name, which may hold spaces; none for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _processor_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _runnable(pid: int) -> bool:
    """Whether it computes or waits for a processor, rather than for anything else."""
    return _stat(pid)[:1] == ["R"]
