"""``report.html`` on the way: written by a process of its own, which takes no time of the run's."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.environments.child import importable

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0
NICENESS = 10
"""It may have a core that a rank wants: the rank comes first."""
PATIENCE_S = 20.0


class LiveReport:
    """Refreshes the report of ``run_dir`` once a minute at most, one process at a time."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._last = clock()
        self._process: subprocess.Popen | None = None
        self._begun = self._broken = False

    def offer(self, evaluated: bool) -> None:
        """Refresh it if it is time, which the first evaluation always is; the rows of the step are written."""
        due = self._clock() - self._last >= INTERVAL_S or (evaluated and not self._begun)
        if not due or self._is_busy() or self._broken:
            return
        self._begun, self._last = True, self._clock()
        try:
            self._process = start_report(self._run_dir)
        except OSError as error:
            self._give_up(str(error))

    def close(self) -> None:
        """Wait for the process that writes, so that it does not overwrite what comes after."""
        if self._process is not None:
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _is_busy(self) -> bool:
        if self._process is None:
            return False
        status = self._process.poll()
        if status is not None:
            self._process = None
            if status != 0:
                self._give_up(f"exit status {status}")
        return status is None

    def _give_up(self, reason: str) -> None:
        self._broken = True
        logger.warning(
            "report.html is not refreshed any more (%s); python -m megatron_rl.metrics.report %s says why",
            reason, self._run_dir,
        )  # fmt: skip


def start_report(run_dir: Path) -> subprocess.Popen:
    """Begin to write the report of ``run_dir``, from what lies there now.

    Raises:
        OSError: no process can be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.metrics.report", os.path.realpath(run_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **importable()},
    )
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    return process
