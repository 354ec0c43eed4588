"""Keeps an environment server alive as a child of the trainer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from megatron_rl.environments.address import get_json, read_address
from megatron_rl.environments.loading.supervise import LOAD_SECONDS
from megatron_rl.errors import EnvironmentFault

STOP_SECONDS = 5.0
WATCH_SECONDS = 0.5
HEALTHY_SECONDS = 10.0
"""A server that ran for so long has not died at its start."""
HUNG_SECONDS = 60.0
"""A server that leaves its health route unanswered for so long is ended; any load leaves it 0.1 s or so."""
PROBE_SECONDS = 5.0
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 0)
"""Exit statuses of a server that somebody, or the kernel short of memory, has ended; 0 is its answer to SIGTERM."""
LOG_TAIL_LINES = 15
LOADING = ", now loading: "
"""In a line of the server's log that names what may not come back."""

logger = logging.getLogger(__name__)


class EnvironmentServerProcess:
    """One environment server, started by the first rank of a node; use it as a context manager.

    The server holds the read end of a pipe from this process and exits when it closes, so even a trainer
    that is killed leaves none behind.
    """

    def __init__(
        self,
        config_path: str | Path,
        directory: str | Path,
        *,
        port: int = 0,
        start_timeout: float = LOAD_SECONDS,
        max_restarts: int = 3,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        """``directory`` gets the server's log and its address file; port 0 takes a free one.

        The start with all imports, and later the reading of each split, may take ``start_timeout`` seconds.

        After ``max_restarts`` in a row, without an answer or ten seconds of health in between, it is given up.
        A healthy server that was killed is restarted however often: nothing says that the next will not work.
        """
        self.address_file = Path(directory).resolve() / "environment_server.json"
        self.log_file = Path(directory).resolve() / "environment_server.log"
        self.restarts = 0
        """Of the whole run."""
        self._config_path = Path(config_path).resolve()
        self._port = port
        self._start_timeout = start_timeout
        self._max_restarts = max_restarts
        self._hung_seconds = hung_seconds
        self._in_a_row = 0
        self._healthy = False
        self._launched = self._last_answer = 0.0
        self._process: subprocess.Popen | None = None
        self._lock = threading.RLock()  # a signal handler may call stop() while ensure_alive() runs
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process id while there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts the server and waits until it answers; if not, ``EnvironmentFault`` with its log's end."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._launch()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, args=(self._stopped,), daemon=True).start()

    def ensure_alive(self) -> None:
        """Restarts a server that has exited; ``EnvironmentFault`` when it did so too often in a row.

        A server that runs but is slow is left alone: a grade may take long, and the client has its timeout.
        """
        with self._lock:
            if self._process is None:
                raise EnvironmentFault("the environment server is not started; call start() first")
            if self._process.poll() is None:
                return
            what = f"the environment server exited ({self._process.returncode})"
            if not (self._healthy and self._process.returncode in FROM_OUTSIDE):
                if self._gave_up:
                    raise self._fault(f"{what} after {self._in_a_row} restarts")
                self._in_a_row += 1
            self.restarts += 1
            logger.warning("%s; restart %d, %d of %d in a row", what, self.restarts, self._in_a_row, self._max_restarts)
            self._launch()

    def note_answer(self) -> None:
        """The server has done something: should it die again, that is another story."""
        self._in_a_row = 0

    @property
    def _gave_up(self) -> bool:
        return self._in_a_row >= self._max_restarts

    def stop(self) -> None:
        """Ends the server, by force if need be; it keeps nothing that could be lost."""
        self._stopped.set()
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _end(process)
                self.address_file.unlink(missing_ok=True)

    def _watch(self, stopped: threading.Event) -> None:
        """Restarts the server for the other ranks of the node, also while this one waits for them."""
        while not stopped.wait(WATCH_SECONDS):
            try:
                with self._lock:
                    if not stopped.is_set():
                        self.ensure_alive()
            except EnvironmentFault as fault:
                logger.error("%s", fault)
                if self._gave_up:
                    return
            else:
                self._probe()

    def _probe(self) -> None:
        """Ends a server that is there but answers nothing; the next look restarts it."""
        process, now = self._process, time.monotonic()
        if process is None or now - self._last_answer < min(PROBE_SECONDS, self._hung_seconds / 2):
            return
        try:
            get_json(read_address(self.address_file), "/v1/health", timeout=PROBE_SECONDS)
        except EnvironmentFault as fault:
            if time.monotonic() - self._last_answer > self._hung_seconds:
                logger.error("the environment server is alive but has hung: %s", fault)
                self._healthy = False  # its end is its own fault
                process.kill()
                process.wait()
            return
        self._last_answer = time.monotonic()
        if self._last_answer - self._launched > HEALTHY_SECONDS:
            self.note_answer()

    def _launch(self) -> None:
        self._healthy = False
        if self._process is not None:
            _end(self._process)  # exited already: closes the pipe
        self.address_file.parent.mkdir(parents=True, exist_ok=True)
        self.address_file.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "megatron_rl.environments",
            "serve",
            str(self._config_path),
            "--port",
            str(self._port),
            "--address-file",
            str(self.address_file),
            "--load-timeout",
            str(self._start_timeout),
        ]
        # what this process can import the server can, wherever the trainer's script was started from
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths},
                # torchrun passes SIGTERM to the whole group of a rank: the server would be gone while the
                # rank still grades its last step
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            _end(self._process)
            raise

    def _wait_until_healthy(self, process: subprocess.Popen) -> None:
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise self._fault(f"the environment server exited ({process.returncode}) while it started")
            try:
                get_json(read_address(self.address_file), "/v1/health", timeout=1.0)
                self._launched = self._last_answer = time.monotonic()
                self._healthy = True
                return
            except EnvironmentFault:
                time.sleep(0.02)
        raise self._fault(f"the environment server did not answer within {self._start_timeout:g} s")

    def _fault(self, what: str) -> EnvironmentFault:
        """The error with the end of the server's log."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        # what was loaded is of interest only where nothing came after it
        lines = [line for line in lines[:-1] if LOADING not in line] + lines[-1:]
        return EnvironmentFault("\n".join([f"{what}; see {self.log_file}:", *lines[-LOG_TAIL_LINES:]]))


def _end(process: subprocess.Popen) -> None:
    """Asks, waits, kills; returns when the process is gone and reaped."""
    process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
