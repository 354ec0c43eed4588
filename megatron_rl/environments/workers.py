"""The pool of grading workers: no completion and no environment holds or ends the caller.

The workers are forks of one process with the slow imports done (``worker``): a fresh one costs 0.03 s where an import
of sympy costs a second. That process is this one's child, and is replaced when it dies.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection
from typing import Any, Self

from megatron_rl.environments.child import start_child
from megatron_rl.environments.results import result_from_json
from megatron_rl.environments.wire import group_to_json, item_to_json, receive, run_to_json, send
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Grade, HarnessRun, Item, Task, Transcript

MOST_WORKERS = 4
MEMORY_MB = 4096
"""What a worker may write to: half of it is torch, where a reward imports it."""
HARNESS_MEMORY_MB = 8192
GONE_SECONDS = 1.0
CLOSE_SECONDS = 5.0
"""In which the workers are ended and their directories removed."""
COUNTED = ("graded", "worker_timeouts", "worker_deaths", "worker_respawns", "retried", "failed", "fork_servers")
COUNTED += ("runs", "runs_cancelled")


class WorkerPool:
    """Grades in worker processes, for any number of threads; ``close`` ends it.

    A request that exceeds its deadline, or whose worker dies, is tried once more on a fresh worker. If that
    fails too, its result has the code ``timeout`` or ``worker_died``; the other requests go on meanwhile.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        memory_mb: int = MEMORY_MB,
        environments: Sequence[tuple[str, Mapping[str, Any]]] = (),
        once: bool = False,
        variables: Collection[str] = (),
    ) -> None:
        """``workers`` defaults to the number of usable processors, 4 at most.

        A worker has a temporary directory and sees ``variables`` of this process. With ``once`` it takes one sample,
        with that as its working directory, and nothing is tried again (``for_harnesses``).
        ``environments`` (references with options), and what their graders name in ``PRELOAD``, are imported before
        any worker is forked; all else by each worker anew, within the deadline of its first request.
        """
        count = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._settings = {"count": count, "memory_mb": memory_mb, "environments": environments, "once": once}
        self._variables = frozenset(variables)
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self.beats = 0
        """Messages of the process so far: it is alive while they become more."""
        self._numbers = itertools.count()
        self._asked: dict[int, Future[list[Grade]]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    @classmethod
    def for_harnesses(
        cls, processes: int, environments: Sequence[tuple[str, Mapping[str, Any]]], variables: Collection[str] = (),
        once: bool = True,
    ) -> Self:  # fmt: skip
        """Make a pool in which each sample has its own process, at most so many at once; without ``once`` graders that
        start programs or wait for a server."""
        return cls(processes, memory_mb=HARNESS_MEMORY_MB, environments=environments, once=once, variables=variables)

    def grade(
        self, reference: str, options: Mapping[str, Any], items: Sequence[Item], deadline_s: float, lowest: float,
        mcp: Mapping[str, Any] | None = None,
    ) -> list[Grade]:  # fmt: skip
        """Return the results of an environment's samples or steps, in order; each try may take ``deadline_s``.

        A completion that ran its grader out of time twice is at fault: it gets the reward ``lowest`` and the verdict
        ``timeout``. ``EnvironmentFault`` when the pool is closed, or its process ends meanwhile.
        """
        served = {"mcp": mcp} if mcp else {}
        futures = [self._ask(reference, options, served | item_to_json(item), deadline_s)[1] for item in items]
        results = [future.result()[0] for future in futures]
        late = Grade(lowest, status="timeout", correct=False)
        return [late if result.code == "timeout" else result for result in results]

    def grade_group(
        self, reference: str, options: Mapping[str, Any], task: Task, transcripts: Sequence[Transcript],
        deadline_s: float,
    ) -> list[Grade]:  # fmt: skip
        """Return the results of a group that is graded together, in order; see `grade`.

        Whose completion ran the grader out of time nobody knows: then all have failed with the code ``timeout``.
        """
        return self._ask(reference, options, group_to_json(task, transcripts), deadline_s)[1].result()

    def run(
        self, reference: str, options: Mapping[str, Any], runs: Sequence[HarnessRun], deadline_s: float,
        gone: Callable[[], bool],
    ) -> list[Grade]:  # fmt: skip
        """Run a harness's samples and return results in order, each ``deadline_s`` after its process began at most.

        Asked every second, ``gone`` says that nobody waits any more; the processes are then killed, and there are no
        results. ``EnvironmentFault`` when the pool is closed, or its process ends meanwhile.
        """
        asked = dict(self._ask(reference, options, run_to_json(run), deadline_s) for run in runs)
        while wait(asked.values(), GONE_SECONDS).not_done:
            if gone():
                self._cancel(asked)
                return []
        return [future.result()[0] for future in asked.values()]

    def counters(self) -> dict[str, int]:
        """Count what went wrong since the start, and the requests served."""
        return dict(self._counts)

    def close(self) -> None:
        """Ends all workers; requests that wait fail with ``EnvironmentFault``."""
        self._closed = True
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._channel.fileno())) as end:
            end.shutdown(socket.SHUT_WR)  # it then ends what the samples have started, and removes their files
        self._reader.join(CLOSE_SECONDS)
        self._process.kill()  # its workers follow: PR_SET_PDEATHSIG
        with self._lock:  # none is being started
            self._process.kill()
        self._reader.join()

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            send(self._channel, message)
        except OSError:  # it has just died; the reader fails the futures
            self._process.kill()

    def _cancel(self, numbers: Collection[int]) -> None:
        with self._lock:
            cancelled = [number for number in numbers if self._asked.pop(number, None) is not None]
            self._tell({"cancel": cancelled})

    def _ask(
        self, reference: str, options: Mapping[str, Any], asked: Mapping[str, Any], deadline_s: float
    ) -> tuple[int, Future[list[Grade]]]:
        request = {"environment": reference, "options": dict(options), **asked}
        future: Future[list[Grade]] = Future()
        with self._lock:
            if self._closed:
                raise EnvironmentFault("the grading pool is closed")
            if not self._reader.is_alive():
                self._start()
            number = next(self._numbers)
            self._asked[number] = future
            self._tell({"id": number, "deadline_s": deadline_s, "request": request})
        return number, future

    def _start(self) -> None:
        module = "megatron_rl.environments.worker"
        scratch = tempfile.mkdtemp(prefix="grading_")
        variables = worker_environment(self._variables)
        self._process, self._channel = start_child(module, variables, stdout=subprocess.DEVNULL)
        with contextlib.suppress(OSError):  # it has ended already, which the reader finds
            send(self._channel, self._settings | {"scratch": scratch})
        self._counts["fork_servers"] += 1
        self._reader = threading.Thread(target=self._read, args=(self._channel, self._process, scratch), daemon=True)
        self._reader.start()

    def _read(self, channel: Connection, process: subprocess.Popen, scratch: str) -> None:
        """Hands out the results of one process, until it ends."""
        try:
            while True:
                message = receive(channel)
                self.beats += 1
                self._counts.update(message["events"])
                # nobody waits for one that was cancelled while it ended
                if "id" in message and (future := self._asked.pop(message["id"], None)) is not None:
                    future.set_result(list(map(result_from_json, message["results"])))
        except (EOFError, OSError):
            process.kill()
            process.wait()
            shutil.rmtree(scratch, ignore_errors=True)  # where it could not do so itself
        with self._lock:
            asked, self._asked = self._asked, {}
            why = "the grading pool is closed" if self._closed else "the process of the grading workers ended"
            for future in asked.values():
                future.set_exception(EnvironmentFault(why))


def worker_environment(needed: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of the process and its workers, in which a grader finds no token and no GPU.
    ``needed`` are those that an environment says it needs."""
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", *needed)
    fixed = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""}
    fixed |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {name: os.environ[name] for name in kept if name in os.environ} | fixed
