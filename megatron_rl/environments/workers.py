"""The pool of grading workers: no completion and no environment holds or ends the caller.

A worker that hangs or dies is replaced, by a fork of a template process (``worker``) in which
the slow imports are done: a fresh worker costs 0.03 s where an import of sympy costs a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, Self

import psutil

from megatron_rl.environments.limits import Limits, worker_environment
from megatron_rl.environments.results import failed, results_from_json
from megatron_rl.environments.wire import item_to_json, receive, send
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import GradeResult, Item

DEADLINE_S = 5.0
MOST_WORKERS = 4
PRELOAD = ("sympy", "math_verify", "latex2sympy2_extended.latex2sympy2")
START_SECONDS = 60.0
"""The template's imports take one second, on a busy machine many."""
LONGEST_WAIT = 3
"""Deadlines, for a worker that got no processor: on a busy machine graders of milliseconds waited four seconds for
one, and a plain timeout called good completions hopeless."""
RETRIED = ("timeout", "worker_died", "environment_exception")
"""Codes that a fresh worker may not repeat; a reward that is no number it would."""
COUNTED = ("graded", "worker_timeouts", "worker_deaths", "worker_respawns", "retried", "failed", "fork_servers")


class WorkerPool:
    """Grades in worker processes, for any number of threads; a context manager, or ``close()`` it.

    A request that exceeds its deadline, or whose worker dies, is tried once more on a fresh worker. If that
    fails too, its result has the code ``timeout`` or ``worker_died``; the other requests go on meanwhile.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        limits: Limits | None = None,
        preload: Sequence[str] = PRELOAD,
        environments: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> None:
        """``workers`` defaults to the number of usable processors, 4 at most.

        The modules of ``preload`` and the ``environments`` (references with options) are imported once, before
        any worker is forked; all others by each worker anew, within the deadline of its first request.
        """
        self.deadline_s = deadline_s
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        settings = {"limits": asdict(limits or Limits()), "preload": preload, "environments": environments}
        self._template = _Template(json.dumps(settings))
        self._closed = False
        count = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._executor = ThreadPoolExecutor(count, "grading")
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(count):
            self._slots.put(_Slot(self._template))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, requests: Sequence[Mapping[str, Any]], deadline_s: float | None = None) -> list[GradeResult]:
        """One result for each request, in order; ``deadline_s`` is each try's, not the whole call's.

        ``EnvironmentFault`` when the pool is closed or no worker can be started.
        """
        if self._closed:
            raise EnvironmentFault("the grading pool is closed")
        deadline = deadline_s or self.deadline_s
        try:
            futures = [self._executor.submit(self._judge, request, deadline) for request in requests]
            return [future.result() for future in futures]
        except (CancelledError, RuntimeError) as error:  # of an executor that is shut down
            raise EnvironmentFault("the grading pool is closed") from error

    def grade(
        self,
        reference: str,
        options: Mapping[str, Any],
        items: Sequence[Item],
        *,
        lowest: float = 0.0,
        deadline_s: float | None = None,
    ) -> list[GradeResult]:
        """The results of an environment's samples or steps, in order.

        ``reference`` and ``options`` name the environment as a list entry does. A completion that ran its
        grader out of time twice is at fault: it gets the reward ``lowest`` and the verdict ``timeout``.
        """
        environment = {"environment": reference, "options": dict(options)}
        results = self.run([environment | item_to_json(item) for item in items], deadline_s)
        late = GradeResult("ok", lowest, verdict="timeout")
        return [late if result.code == "timeout" else result for result in results]

    def counters(self) -> dict[str, int]:
        """How often something went wrong since the start, and how many requests were served."""
        with self._counts_lock:
            counts = self._counts | Counter(fork_servers=self._template.starts)
        return {name: counts[name] for name in COUNTED}

    def close(self) -> None:
        """Ends all workers; requests that wait fail with ``EnvironmentFault``."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._template.close()
        self._executor.shutdown()

    def _count(self, name: str) -> None:
        with self._counts_lock:
            self._counts[name] += 1

    def _judge(self, request: Mapping[str, Any], deadline_s: float) -> GradeResult:
        """The result of a request; after a failure the result of a second try on a fresh worker."""
        slot = self._slots.get()
        try:
            result = self._attempt(slot, request, deadline_s)
            if result.code in RETRIED:
                self._count("retried")
                if result.code == "environment_exception":  # the others have been ended
                    self._replace(slot)
                result = self._attempt(slot, request, deadline_s)
                if result.status == "error":
                    self._count("failed")
            self._count("graded")
            return result
        finally:
            self._slots.put(slot)

    def _attempt(self, slot: _Slot, request: Mapping[str, Any], deadline_s: float) -> GradeResult:
        slot.make_ready()
        try:
            return slot.ask(request, deadline_s)
        except TimeoutError:
            self._count("worker_timeouts")
            self._replace(slot)
            return failed("timeout", f"no grade within {deadline_s:g} s")
        except (EOFError, OSError, ValueError, psutil.Error) as error:
            self._count("worker_deaths")
            return failed("worker_died", " ".join(f"the grading worker {self._replace(slot)} {error}".split()))

    def _replace(self, slot: _Slot) -> str:
        self._count("worker_respawns")
        return slot.end()


class _Slot:
    """A worker at a time, for one thread at a time."""

    def __init__(self, template: _Template) -> None:
        self._template = template
        self._pid = 0
        self._channel: Connection | None = None

    def make_ready(self) -> None:
        """Sees to a worker that waits for requests; ``EnvironmentFault`` when none can be had."""
        if self._channel is None:
            self._pid, self._channel = self._template.fork()

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> GradeResult:
        """The worker's result; ``TimeoutError`` for one that has used up its time, another error for a dead one."""
        worker = psutil.Process(self._pid)
        computed = sum(worker.cpu_times()[:2])  # user and system
        send(self._channel, request)
        for _ in range(LONGEST_WAIT):
            if self._channel.poll(deadline_s):
                return results_from_json({"items": [receive(self._channel)]}, 1)[0]
            idle = worker.status() != psutil.STATUS_RUNNING  # which is also said of one that waits for a processor
            if idle or sum(worker.cpu_times()[:2]) - computed > deadline_s / 2:
                break
        raise TimeoutError

    def end(self) -> str:
        """Ends the worker and says how it ended; the next request gets another."""
        self._channel.close()
        self._channel = None
        return self._template.end(self._pid)


class _Template:
    """The process that forks workers; one that died is replaced at the next request. For any thread."""

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._closed = False
        self.starts = 0
        self._start()

    def fork(self) -> tuple[int, Connection]:
        """Process id and channel of a new worker, ready for requests: from here on its deadline counts."""
        ours, theirs = multiprocessing.Pipe()
        try:
            with theirs, self._lock:
                if self._closed:
                    raise EnvironmentFault("the grading pool is closed")
                try:
                    pid = self._ask(0, theirs)
                except OSError:  # it was killed
                    self._stop()
                    self._start()
                    pid = self._ask(0, theirs)
            receive(ours)
        except (EOFError, OSError, ValueError) as error:
            ours.close()
            raise EnvironmentFault(f"no grading worker could be started: {error or 'it ended'}") from error
        return pid, ours

    def end(self, pid: int) -> str:
        """Kills the worker and says how it ended."""
        try:
            with self._lock:
                return self._ask(pid)
        except (OSError, ValueError):
            return "ended with its template"

    def close(self) -> None:
        """Ends the template and every worker."""
        with self._lock:
            self._closed = True
            self._stop()

    def _ask(self, pid: int, *channels: Connection) -> Any:
        """The answer to a channel for a new worker, or to the process id of one that is to end."""
        socket.send_fds(self._control, [str(pid).encode()], [channel.fileno() for channel in channels])
        answer = self._control.recv(4096)
        if not answer:
            raise ConnectionError("the template of the workers ended")
        return json.loads(answer)

    def _start(self) -> None:
        # a packet socket keeps messages apart; a stream would let a descriptor arrive with another's bytes
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        command = [sys.executable, "-m", "megatron_rl.environments.worker", str(theirs.fileno()), self._settings]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C and a launcher's SIGTERM are for the trainer
            )
        self.starts += 1

    def _stop(self) -> None:
        self._control.close()
        self._process.kill()  # its workers follow: PR_SET_PDEATHSIG
        self._process.wait()
