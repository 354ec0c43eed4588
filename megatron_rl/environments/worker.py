"""The process that has samples graded: it imports what is slow, then forks a worker for every sample at a time.

It has one thread, so a fork copies no locks; it ends a worker at its deadline, tries a sample once more on a fresh
one, and is the parent of all of them, so that it can say how one died. It ends when its pool's channel closes, and
the workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from megatron_rl.environments.child import die_with_parent, kill_group, parent_channel
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.results import failed, judge, result_from_json, result_to_json
from megatron_rl.environments.wire import item_from_json, receive, send
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Grade

MAX_OPEN_FILES = 64
OUT_OF_MEMORY = 99
"""Exit status of a worker whose memory ran out: what is left of it is not to be trusted."""
LONGEST_WAIT = 3
"""Deadlines, for a worker that got no processor: on a busy machine graders of milliseconds waited four seconds for
one, and a plain timeout called good completions hopeless."""
RETRIED = ("timeout", "worker_died", "environment_exception")
"""Codes that a fresh worker may not repeat; a reward that is no number it would."""


def main() -> None:
    """Answers the requests of the pool, whose first message is its settings."""
    pool = parent_channel()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an author's code may raise it
    with contextlib.suppress(EOFError):
        settings = receive(pool)
        for module in settings["preload"]:
            with contextlib.suppress(ImportError):  # an environment that needs it says so with its own error
                importlib.import_module(module)
        for reference, options in settings["environments"]:
            with contextlib.suppress(Exception, SystemExit):  # told by its first request
                _environment(reference, dumps(options))
        gc.freeze()  # a collection in a worker would otherwise copy every page of sympy
        _Grading(pool, settings["count"], settings["memory_mb"]).run()


class _Grading:
    """Samples that wait, and the workers."""

    def __init__(self, pool: Connection, count: int, memory_mb: int) -> None:
        self._pool, self._count, self._memory_mb = pool, count, memory_mb
        self._waiting: deque[dict[str, Any]] = deque()
        self._workers: list[_Worker] = []

    def run(self) -> None:
        """Until the pool closes its channel, which raises ``EOFError``."""
        while True:
            busy = [worker for worker in self._workers if worker.job is not None]
            ends = min((worker.ends for worker in busy), default=None)
            seconds = None if ends is None else max(ends - time.monotonic(), 0.0)
            ready = wait([self._pool, *(worker.channel for worker in busy)], seconds)
            for worker in busy:
                result = worker.result() if worker.channel in ready or worker.is_late() else None
                if result is not None:
                    self._take(worker, result)
            if self._pool in ready:
                self._waiting.append(receive(self._pool))
            while self._waiting and (worker := self._idle_worker()) is not None:
                worker.begin(self._waiting.popleft())

    def _take(self, worker: _Worker, result: Grade) -> None:
        """Hands a result to the pool, unless a fresh worker may find another."""
        job, worker.job = worker.job, None
        events, again = [], result.code in RETRIED and not job.get("retried")
        if result.code in ("timeout", "worker_died"):
            events.append("worker_timeouts" if result.code == "timeout" else "worker_deaths")
        if events or again:
            events.append("worker_respawns")
            how = worker.end()
            self._workers.remove(worker)
            if result.code == "worker_died":
                result = failed(result.code, f"the grading worker {how} {result.message}".rstrip())
        if again:
            self._waiting.appendleft(job | {"retried": True})
            send(self._pool, {"events": [*events, "retried"]})
        else:
            events += ["graded", "failed"] if job.get("retried") and result.failed else ["graded"]
            send(self._pool, {"events": events, "id": job["id"], "result": result_to_json(result)})

    def _idle_worker(self) -> _Worker | None:
        idle = next((worker for worker in self._workers if worker.job is None), None)
        if idle is None and len(self._workers) < self._count:
            idle = _Worker(self._memory_mb, [self._pool, *(worker.channel for worker in self._workers)])
            self._workers.append(idle)
        return idle


class _Worker:
    """One worker process, seen from its parent."""

    def __init__(self, memory_mb: int, others: list[Connection]) -> None:
        """Forks it; the channels of ``others`` are not its business."""
        self.job: dict[str, Any] | None = None
        self.ends = 0.0
        self.channel, theirs = multiprocessing.Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid:
            theirs.close()
            self._process = psutil.Process(self._pid)
            return
        try:
            die_with_parent(parent)
            os.setpgid(0, 0)  # what it starts is killed with it
            for channel in (self.channel, *others):
                channel.close()
            nowhere = os.open(os.devnull, os.O_WRONLY)  # the log is a file, and to print to it would fail the grader
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            _bound(memory_mb)
            _work(theirs)
        finally:
            os._exit(0)  # never back into its parent's loop

    def begin(self, job: dict[str, Any]) -> None:
        """Has the worker grade; from here on its deadline counts."""
        self.job, self._begun, self._computed = job, time.monotonic(), self._processor_seconds()
        self.ends = self._begun + job["deadline_s"]
        with contextlib.suppress(OSError):  # it is dead, which ``result`` finds
            send(self.channel, job["request"])

    def is_late(self) -> bool:
        """Whether the deadline has passed; it is put off for a worker that waits for a processor."""
        now, deadline = time.monotonic(), self.job["deadline_s"]
        if now < self.ends:
            return False
        with contextlib.suppress(psutil.Error):
            starved = self._process.status() == psutil.STATUS_RUNNING  # which is also said of one that waits
            starved &= self._processor_seconds() - self._computed < deadline / 2
            if starved and now < self._begun + (LONGEST_WAIT - 0.5) * deadline:
                self.ends = now + deadline
                return False
        return True

    def result(self) -> Grade:
        """What the worker answers, or that it is late or dead."""
        try:
            if not self.channel.poll(0):
                return failed("timeout", f"no grade within {self.job['deadline_s']:g} s")
            return result_from_json(receive(self.channel))
        except (EOFError, OSError, ValueError) as error:
            return failed("worker_died", str(error))

    def end(self) -> str:
        """Kills the worker with what it started and says how it ended: by this, or by what came before."""
        self.channel.close()
        kill_group(self._pid)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"exited with status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _processor_seconds(self) -> float:
        with contextlib.suppress(psutil.Error):
            return sum(self._process.cpu_times()[:2])  # user and system
        return 0.0


def _bound(memory_mb: int) -> None:
    """Binds this process, for good: a little memory and few files, none of them written."""
    bounds = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def _work(channel: Connection) -> None:
    """Inside a worker: answers requests until the channel closes."""
    with contextlib.suppress(EOFError):
        while True:
            send(channel, result_to_json(_answer(receive(channel))))
            gc.collect(0)


def _answer(request: Mapping[str, Any]) -> Grade:
    """The result of one request, whatever the grader does short of killing the process."""
    try:
        environment = _environment(request["environment"], dumps(request["options"]))
        result = judge(environment, item_from_json(request))
    except BaseException as error:  # noqa: BLE001 - also KeyboardInterrupt, raised by an author's code
        result = failed("environment_exception", f"{type(error).__name__}: {error}")
    if result.message.startswith("MemoryError"):
        os._exit(OUT_OF_MEMORY)
    return result


@lru_cache(maxsize=64)
def _environment(reference: str, options: str) -> Any:
    """Made once for each worker; a grader keeps nothing between two calls."""
    return find_environment(reference).from_options(loads(options))


if __name__ == "__main__":
    main()
