"""The pool's side of the fork server: starts it, asks it for workers, has it end them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.environments.pool.channel import receive
from megatron_rl.environments.pool.limits import Limits, worker_environment
from megatron_rl.errors import EnvironmentFault

START_SECONDS = 60.0
"""Its imports take one second, on a busy machine many."""


@dataclass(frozen=True)
class Worker:
    """One worker process and the channel to it."""

    pid: int
    channel: socket.socket
    server: int
    """Process id of the fork server it belongs to."""


class Forkserver:
    """Forks workers; a fork server that died is replaced at the next request. Safe to use from many threads."""

    def __init__(
        self, limits: Limits, preload: Sequence[str], environments: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> None:
        self._settings = {
            "limits": asdict(limits),
            "preload": list(preload),
            "environments": [[reference, dict(options)] for reference, options in environments],
            "parent": os.getpid(),
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self.starts = 0

    def start(self) -> None:
        """Starts the process; its imports go on while this one does other things."""
        with self._lock:
            self._ensure_running()

    def spawn(self) -> Worker:
        """A new worker, ready for requests."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                answer = self._ask_for_worker(theirs)
                server = self._process.pid
            receive(ours, START_SECONDS)  # ready: from here on the deadline of a request counts
            return Worker(answer["pid"], ours, server)
        except (OSError, ValueError) as error:
            ours.close()
            raise EnvironmentFault(f"no grading worker could be started: {error}") from error

    def end(self, worker: Worker) -> str:
        """Kills the worker and says how it ended: by our SIGKILL, or by what came before it."""
        worker.channel.close()
        try:
            with self._lock:
                if self._process is None or self._process.pid != worker.server:
                    return "ended with its fork server"
                status = self._ask({"do": "end", "pid": worker.pid})["status"]
        except (OSError, ValueError):
            return "ended with its fork server"
        if os.WIFSIGNALED(status):
            return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"exited with status {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """Ends the fork server and every worker."""
        with self._lock:
            self._closed = True
            self._stop()

    def _ask_for_worker(self, theirs: socket.socket) -> dict:
        """A fork server that was killed may still look alive; then the next one is asked."""
        self._ensure_running()
        try:
            return self._ask({"do": "spawn"}, theirs)
        except OSError:
            self._stop()
            self._ensure_running()
            return self._ask({"do": "spawn"}, theirs)

    def _ensure_running(self) -> None:
        if self._closed:
            raise EnvironmentFault("the grading pool is closed")
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        # a packet socket keeps messages apart; a stream would let a descriptor arrive with another's bytes
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        command = [sys.executable, "-m", "megatron_rl.environments.pool.forkserver", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C and a launcher's SIGTERM are for the trainer
            )
        self.starts += 1

    def _ask(self, request: dict, descriptor: socket.socket | None = None) -> dict:
        descriptors = [] if descriptor is None else [descriptor.fileno()]
        socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        answer = self._control.recv(4096)
        if not answer:
            raise ConnectionError("the fork server ended")
        return json.loads(answer)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its workers follow: PR_SET_PDEATHSIG
                self._process.wait()
        self._control = self._process = None
