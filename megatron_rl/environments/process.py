"""Keeps an environment server alive as a child of the trainer, and counts what happened to it for a step's metrics."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self

from megatron_rl.environments.child import HARNESS_PROCESSES, LOAD_SECONDS, importable
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.wire import LOADING, write_private
from megatron_rl.errors import EnvironmentFault
from megatron_rl.json_text import dumps
from megatron_rl.user_files import is_entry

WATCH_SECONDS = 0.05
MAX_RESTARTS = 3
"""After so many in a row, without ten seconds of health in between, it is given up, and the address file tells every
client of the launcher. A healthy server that was killed is restarted however often: nothing says that the next will not
work."""
HEALTHY_SECONDS = 10.0
"""A server that ran for so long has not died at its start."""
HUNG_SECONDS = 60.0
"""A server that leaves its health route unanswered for so long is ended: a grader in process that stays in one call of
a C library, such as a regular expression, holds up every route for good."""
PROBE_SECONDS = 5.0
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 0)
"""Exit statuses of a server that somebody, or the kernel short of memory, has ended."""
LOG_TAIL_LINES = 15

logger = logging.getLogger(__name__)


class EnvironmentServerProcess:
    """One environment server, started by the first rank of a launcher; use it as a context manager.

    The server is killed with the process that started it, so even a trainer that is killed leaves none behind. It
    keeps nothing that could be lost.
    """

    def __init__(
        self,
        config_path: str | Path,
        directory: str | Path,
        *,
        port: int = 0,
        start_timeout: float = LOAD_SECONDS,
        harness_processes: int = HARNESS_PROCESSES,
    ) -> None:
        """``directory`` gets the server's log and its address file; port 0 takes a free one.

        ``start_timeout`` bounds the start with all imports, and later the reading of each split; at most
        ``harness_processes`` samples of harnesses run at once.
        """
        folder = Path(os.path.realpath(directory))
        self.address_file, self.log_file = folder / "environment_server.json", folder / "environment_server.log"
        self.restarts = 0
        """Of the whole run."""
        self.fault: EnvironmentFault | None = None
        """Why it was given up."""
        self.pid: int | None = None
        """Of the server that answers."""
        self._start_timeout = start_timeout
        listed = str(config_path) if is_entry(str(config_path)) else os.path.realpath(config_path)
        self._command = ["-m", "megatron_rl.environments", "serve", listed]
        self._command += ["--port", str(port), "--address-file", str(self.address_file), "--parent", str(os.getpid())]
        self._command += ["--load-timeout", str(start_timeout), "--harness-processes", str(harness_processes)]
        # the thread is the server's parent, which the server follows in death: it lasts as long as the process
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._settled, self._stopped = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        """Starts the server and waits until it answers; if not, ``EnvironmentFault`` with its log's end."""
        self.address_file.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        while self._thread.is_alive() and not self._settled.wait(WATCH_SECONDS):
            pass
        if self.fault is not None:
            raise self.fault
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.address_file.unlink(missing_ok=True)

    def _supervise(self) -> None:
        """Starts the server, and again when it has ended."""
        in_a_row = 0
        while True:
            process = self._launch()
            what, lived = self._watch(process)
            blameless, self.pid = lived > 0 and process.returncode in FROM_OUTSIDE, None
            process.kill()
            process.wait()
            self.address_file.unlink(missing_ok=True)
            if self._stopped.is_set():
                return
            if not blameless:
                in_a_row = 1 if lived > HEALTHY_SECONDS else in_a_row + 1
            if in_a_row > MAX_RESTARTS or not self._settled.is_set():
                self._give_up(what + (f" after {self.restarts} restarts" if self.restarts else ""))
                return
            self.restarts += 1
            logger.warning("%s; restart %d, %d of %d in a row", what, self.restarts, in_a_row, MAX_RESTARTS)

    def _launch(self) -> subprocess.Popen:
        self.address_file.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **importable()},
                # Ctrl-C and torchrun's SIGTERM reach the whole group of a rank: the server would be gone while the
                # rank still grades its last step
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen) -> tuple[str, float]:
        """How the server ended, or that it is there and answers nothing; and for how long it had been there."""
        client, begin, heard, what = EnvironmentClient(self.address_file), 0.0, time.monotonic(), ""
        while not what and not self._stopped.wait(WATCH_SECONDS):
            if not begin and self.address_file.exists():  # it listens
                begin = heard = time.monotonic()
                self.pid = process.pid
                self._settled.set()
            silent = time.monotonic() - heard
            if process.poll() is not None:
                what = f"exited ({process.returncode})" + ("" if begin else " while it started")
            elif not begin and silent > self._start_timeout:
                what = f"did not answer within {self._start_timeout:g} s"
            elif begin and silent > min(PROBE_SECONDS, HUNG_SECONDS / 2):
                if client.health(PROBE_SECONDS):
                    heard = time.monotonic()
                elif silent > HUNG_SECONDS:
                    what = "is alive but has hung"
        return f"the environment server {what}", begin and time.monotonic() - begin

    def _give_up(self, what: str) -> None:
        """Tells who starts it or, by the address file, every client."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        # what was loaded is of interest only where nothing came after it
        lines = [line for line in lines[:-1] if LOADING not in line] + lines[-1:]
        message = "\n".join([f"{what}; see {self.log_file}:", *lines[-LOG_TAIL_LINES:]])
        logger.error("%s", message)
        self.fault = EnvironmentFault(message)
        write_private(self.address_file, dumps({"fault": message}))
        self._settled.set()


class EnvironmentCounters:
    """Differences of one rank's counts; only the rank that keeps the launcher's server reads the server's."""

    def __init__(self, client: EnvironmentClient, server: EnvironmentServerProcess | None) -> None:
        self._client, self._server = client, server
        self._before: Counter[tuple[int, str]] = Counter()
        """By the process that counts and name: a new server counts from 0."""

    def since_last_call(self) -> dict[str, int]:
        """Return new events by name. A server that cannot be asked has none: its counts come with a later call, unless
        it dies before."""
        totals = {(os.getpid(), name): count for name, count in self._client.counters().items()}
        if self._server is not None:
            totals[os.getpid(), "restarts"] = self._server.restarts
            try:
                pid, counts = self._client.server_counters()
                totals |= {(pid, name): count for name, count in counts.items()}
            except EnvironmentFault as fault:
                logger.warning("the environment server's counters cannot be read: %s", fault)
        new = {key: count - self._before[key] for key, count in totals.items()}
        self._before.update(new)
        return {name: count for (_, name), count in new.items()}
