"""The process that has samples graded: it imports what is slow, then forks a worker for every sample at a time.

It has one thread, so a fork copies no locks; it ends a worker at its deadline, tries a sample once more on a fresh
one, and is the parent of all of them, so that it can say how one died. It ends when its pool's channel closes, and
the workers with it.

A harness's sample has a worker and a directory of its own, and no second try: that would call the model again.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.environments import grading
from megatron_rl.environments.child import adopt_orphans, die_with_parent, kill_group, kill_orphans, parent_channel
from megatron_rl.environments.grading import GRADERS
from megatron_rl.environments.grading.fences import imported_by
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.results import failed, judge, judge_group, result_from_json, result_to_json
from megatron_rl.environments.sandbox import require_sandbox
from megatron_rl.environments.wire import group_from_json, item_from_json, receive, run_from_json, send
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Grade

OUT_OF_MEMORY = 99
"""Exit status of a worker whose memory ran out: what is left of it is not to be trusted."""
BEAT_SECONDS = 1.0
"""The pool hears at least as often that grades which take their time are watched."""
LONGEST_WAIT = 3
"""Deadlines, for a worker that got no processor: on a busy machine graders of milliseconds waited four seconds for
one, and a plain timeout called good completions hopeless."""
OPEN_FILES, FILE_MB = 1024, 1024
"""Of a worker: an author's reward may log and use temporary files; what a model wrote runs in the sandbox alone."""
ENDED_BY = {"timeout": "worker_timeouts", "worker_died": "worker_deaths"}
"""Codes after which the worker is gone, and how they are counted."""
RETRIED = ("timeout", "worker_died", "environment_exception")
"""Codes that a fresh worker may not repeat; a reward that is no number it would."""


def main() -> None:
    """Answers the requests of the pool, whose first message is its settings."""
    pool = parent_channel()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an author's code may raise it
    adopt_orphans()
    with contextlib.suppress(EOFError):
        settings = receive(pool)
        for reference, options in settings["environments"]:
            with contextlib.suppress(Exception, SystemExit):  # told by its first request
                # a harness is set up in its worker: what it keeps alive, threads and sockets, is no fork's to share
                if settings["once"]:
                    found = _class(reference)
                    _import("megatron_rl.environments.harness")
                    found.preload(options)
                else:
                    found = _environment(reference, dumps(options))
                    _import(*_needed_by(getattr(found, "grader", None)))
                if found.needs_sandbox:
                    require_sandbox()  # tried out once for all workers
        if not settings["once"]:
            _import(*_imported_late())
        gc.freeze()  # a collection in a worker would otherwise copy every page of sympy
        with contextlib.closing(_Grading(pool, settings)) as grading:
            grading.run()


def _import(*modules: str) -> None:
    for module in modules:
        with contextlib.suppress(Exception, SystemExit):  # an environment that needs it says so with its own error
            importlib.import_module(module)


def _needed_by(grader: str | None) -> set[str]:
    """What the graders imported so far, and this one, name in ``PRELOAD``."""
    if grader:
        GRADERS.module(grader)
    loaded = [vars(module) for name, module in sys.modules.items() if name.startswith(grading.__name__)]
    return {needed for names in loaded for needed in names.get("PRELOAD", ())}


def _imported_late() -> set[str]:
    """What functions of the files that a user named import: a worker would spend its deadline on it."""
    named = (module for name, module in sys.modules.items() if " in " in name)  # as `registry` names it
    nodes = (node for module in named for node in ast.walk(ast.parse(Path(module.__file__).read_bytes())))
    return {name for node in nodes if isinstance(node, ast.FunctionDef) for name in imported_by(node)}


class _Grading:
    """Samples that wait, and the workers."""

    def __init__(self, pool: Connection, settings: Mapping[str, Any]) -> None:
        self._pool, self._settings = pool, settings
        self._waiting: deque[dict[str, Any]] = deque()
        self._workers: list[_Worker] = []

    def run(self) -> None:
        """Work until the pool closes its channel, which raises ``EOFError``."""
        while True:
            busy = [worker for worker in self._workers if worker.job is not None]
            ends = min((worker.ends for worker in busy), default=None)
            seconds = None if ends is None else min(max(ends - time.monotonic(), 0.0), BEAT_SECONDS)
            ready = wait([self._pool, *(worker.channel for worker in busy)], seconds)
            if not ready:
                send(self._pool, {"events": []})
            for worker in busy:
                if worker.channel in ready or worker.is_late():
                    self._finish(worker, worker.results())
            if self._pool in ready:
                self._receive(receive(self._pool))
            while self._waiting and (worker := self._idle_worker()) is not None:
                worker.begin(self._waiting.popleft())

    def close(self) -> None:
        for worker in list(self._workers):
            self._end(worker)
        shutil.rmtree(self._settings["scratch"], ignore_errors=True)

    def _receive(self, message: dict[str, Any]) -> None:
        """Takes a request, or the word that nobody waits for some any more."""
        if "cancel" not in message:
            self._waiting.append(message)
            return
        cancelled = set(message["cancel"])
        self._waiting = deque(job for job in self._waiting if job["id"] not in cancelled)
        for worker in [each for each in self._workers if each.job is not None and each.job["id"] in cancelled]:
            self._end(worker)
        send(self._pool, {"events": ["runs_cancelled"] * len(cancelled)})

    def _finish(self, worker: _Worker, results: list[Grade]) -> None:
        """Hands results to the pool, unless a fresh worker may find others."""
        job, worker.job = worker.job, None
        code = results[0].code  # those that end or repeat a job are the same for all samples of a group
        is_harness, was_retried = self._settings["once"], job.get("retried", False)
        retries = code in RETRIED and not was_retried and not is_harness
        events = [ENDED_BY[code]] if code in ENDED_BY else []
        if events or retries or is_harness:
            how = self._end(worker)
            events += [] if is_harness else ["worker_respawns"]
            if code == "worker_died":
                results = [failed(code, f"the worker process {how} {each.message}".rstrip()) for each in results]
        if retries:
            self._waiting.appendleft(job | {"retried": True})
            send(self._pool, {"events": [*events, "retried"]})
            return
        events += ["runs" if is_harness else "graded"] * len(results)
        if is_harness or was_retried:
            events += ["failed"] * sum(each.failed for each in results)
        send(self._pool, {"events": events, "id": job["id"], "results": list(map(result_to_json, results))})

    def _idle_worker(self) -> _Worker | None:
        idle = next((worker for worker in self._workers if worker.job is None), None)
        if idle is None and len(self._workers) < self._settings["count"]:
            idle = _Worker(self._settings, self._drop_inherited)
            self._workers.append(idle)
        return idle

    def _drop_inherited(self) -> None:
        """Inside a new worker: drops the samples and channels of others, whose keys are not its business."""
        self._waiting.clear()
        self._pool.close()
        for worker in self._workers:
            worker.job = None
            worker.channel.close()

    def _end(self, worker: _Worker) -> str:
        """Ends a worker with all that it started; returns how it ended."""
        self._workers.remove(worker)
        how = worker.end()
        kill_orphans({each.pid for each in self._workers})
        worker.folder.cleanup()  # now that nothing that it started writes there
        return how


class _Worker:
    """One worker process, seen from its parent."""

    def __init__(self, settings: Mapping[str, Any], drop_inherited: Callable[[], None]) -> None:
        """Forks it; in the worker ``drop_inherited`` is called first."""
        self.job: dict[str, Any] | None = None
        self.ends = 0.0
        self.channel, theirs = multiprocessing.Pipe()
        parent, self._is_harness = os.getpid(), settings["once"]
        # an author may have made folders that nobody may enter
        self.folder = tempfile.TemporaryDirectory(dir=settings["scratch"], ignore_cleanup_errors=True)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            self._process = psutil.Process(self.pid)
            return
        try:
            die_with_parent(parent)
            os.setpgid(0, 0)  # what it starts is killed with it
            self.channel.close()
            drop_inherited()
            with open(os.devnull, "wb") as nowhere:  # the log is a file, and to print to it would fail the grader
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            if self._is_harness:
                adopt_orphans()
            os.environ |= {"HOME": self.folder.name, "TMPDIR": self.folder.name}
            tempfile.tempdir = None  # decided anew
            _bound(settings["memory_mb"])
            _work(theirs)
        finally:
            os._exit(0)  # never back into its parent's loop

    def begin(self, job: dict[str, Any]) -> None:
        """Has the worker grade; from here on its deadline counts."""
        self.job, self._begun, self._computed = job, time.monotonic(), self._processor_seconds()
        self.ends = self._begun + job["deadline_s"]
        with contextlib.suppress(OSError):  # it is dead, which ``results`` finds
            send(self.channel, job["request"])

    def is_late(self) -> bool:
        """Return whether the deadline has passed; it is put off for a worker that waits for a processor."""
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

    def results(self) -> list[Grade]:
        """Return what the worker answers, or that it is late or dead: one result, of a group one a sample."""
        count = _samples_of(self.job["request"])
        try:
            if not self.channel.poll(0):
                what = "reward" if self._is_harness else "grade"
                return [failed("timeout", f"no {what} within {self.job['deadline_s']:g} s")] * count
            rows = receive(self.channel)
            if not isinstance(rows, list) or len(rows) != count:  # an author's code may have found the channel
                raise ValueError("it answered with something else than its results")
            return list(map(result_from_json, rows))
        except (EOFError, OSError, ValueError) as error:
            return [failed("worker_died", str(error))] * count

    def end(self) -> str:
        """Kills the worker with what it started and says how it ended: by this, or by what came before."""
        self.channel.close()
        kill_group(self.pid)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return f"exited with status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _processor_seconds(self) -> float:
        with contextlib.suppress(psutil.Error):
            return sum(self._process.cpu_times()[:2])  # user and system
        return 0.0


def _bound(memory_mb: int) -> None:
    """Binds this process, the size of files aside for good."""
    bounds = {
        resource.RLIMIT_DATA: memory_mb * 2**20,  # not addresses: a browser, or CUDA's libraries, reserve many
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_FSIZE: FILE_MB * 2**20,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        most = resource.getrlimit(kind)[1]  # which only root could raise
        bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
        # a sandbox that a grader starts has files, of a size that is bounded there
        resource.setrlimit(kind, (bound, most if kind == resource.RLIMIT_FSIZE else bound))


def _work(channel: Connection) -> None:
    """Inside a worker: answers requests until the channel closes."""
    with contextlib.suppress(EOFError):
        while True:
            send(channel, list(map(result_to_json, _answer(receive(channel)))))
            gc.collect(0)


def _answer(request: Mapping[str, Any]) -> list[Grade]:
    """The results of one request, whatever the grader does short of killing the process."""
    try:
        served = dumps(request["mcp"]) if "mcp" in request else ""
        environment = _environment(request["environment"], dumps(request["options"]), served)
        if "client" in request:
            from megatron_rl.environments.harness import run_harness  # needs an extra, and graders do without

            os.chdir(tempfile.gettempdir())  # not before: its options may have paths below the run's directory
            results = [run_harness(environment, run_from_json(request))]
        elif "transcripts" in request:
            results = judge_group(environment, *group_from_json(request))
        else:
            results = [judge(environment, item_from_json(request))]
    except BaseException as error:  # noqa: BLE001 - also KeyboardInterrupt, raised by an author's code
        results = [failed("environment_exception", f"{type(error).__name__}: {error}")] * _samples_of(request)
    if any(each.message.startswith("MemoryError") for each in results):
        os._exit(OUT_OF_MEMORY)
    return results


def _samples_of(request: Mapping[str, Any]) -> int:
    """How many results answer a request: one, or one for each answer of a group."""
    return len(request.get("transcripts", (None,)))


_class = lru_cache(maxsize=64)(find_environment)
"""The same in a worker as before the fork, with what it has preloaded."""


@lru_cache(maxsize=64)
def _environment(reference: str, options: str, served: str = "") -> Any:
    """Made once for each worker; a grader keeps nothing between two calls, but for a connection to its tool server."""
    if not served:
        return _class(reference).from_options(loads(options))
    from megatron_rl.environments.mcp.equipment import with_tools  # no other environment needs it

    environment = with_tools(_class(reference)).from_options(loads(options))
    environment.mcp_add(loads(served))
    return environment


if __name__ == "__main__":
    main()
