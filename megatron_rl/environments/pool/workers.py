"""The pool of grading workers, used from any number of threads."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from megatron_rl.environments.pool.limits import Limits
from megatron_rl.environments.pool.slot import Counts, Slot
from megatron_rl.environments.pool.spawning import Forkserver
from megatron_rl.environments.wire import failed, item_to_json
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import GradeResult, Item

DEADLINE_S = 5.0
MOST_WORKERS = 4
PRELOAD = ("sympy", "math_verify", "latex2sympy2_extended.latex2sympy2")

_Job = tuple[Mapping[str, Any], float, "Future[GradeResult]"]


class WorkerPool:
    """Grades in worker processes; use it as a context manager, or ``close()`` it.

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
        self._counts = Counts()
        self._forkserver = Forkserver(limits or Limits(), preload, environments)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        count = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        self._forkserver.start()
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, requests: Sequence[Mapping[str, Any]], deadline_s: float | None = None) -> list[GradeResult]:
        """One result for each request, in order; ``deadline_s`` is each try's, not the whole call's.

        ``EnvironmentFault`` when the pool is closed or no worker can be started.
        """
        if self._closed.is_set():
            raise EnvironmentFault("the grading pool is closed")
        futures: list[Future[GradeResult]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._jobs.put((request, deadline_s or self.deadline_s, future))
        return [future.result() for future in futures]

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
        requests = [environment | item_to_json(item) for item in items]
        results = self.run(requests, deadline_s)
        late = GradeResult("ok", lowest, verdict="timeout")
        return [late if result.code == "timeout" else result for result in results]

    def counters(self) -> dict[str, int]:
        """How often something went wrong since the start, and how many requests were served."""
        return self._counts.as_dict() | {"fork_servers": self._forkserver.starts}

    def close(self) -> None:
        """Ends all workers; requests that wait get the code ``worker_died``."""
        if self._closed.is_set():
            return
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        self._forkserver.close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _serve(self) -> None:
        """One thread's part: a slot of its own, jobs as they come."""
        slot = Slot(self._forkserver, self._counts)
        while (job := self._jobs.get()) is not None:
            request, deadline_s, future = job
            try:
                if self._closed.is_set():
                    future.set_result(failed("worker_died", "the grading pool was closed"))
                else:
                    future.set_result(slot.run(request, deadline_s))
            except Exception as error:  # noqa: BLE001 - the caller waits for this future
                if self._closed.is_set():
                    future.set_result(failed("worker_died", "the grading pool was closed"))
                else:
                    future.set_exception(error)
        slot.end_worker()
