"""One place of the pool: a worker that is replaced when it hangs, dies or has served long enough."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.pool.channel import receive, send
from megatron_rl.environments.pool.patience import await_answer
from megatron_rl.environments.pool.spawning import Forkserver, Worker
from megatron_rl.environments.wire import failed, results_from_json
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import GradeResult

REQUESTS_PER_WORKER = 2000
"""Then it is replaced: sympy's caches grow, and an author's grader may leak."""
RETRIED = ("timeout", "worker_died", "environment_exception")
"""Codes that a fresh worker may not repeat; a reward that is no number it would."""


class Counts:
    """Named counters that several threads raise."""

    def __init__(self) -> None:
        self._counter: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Raises one counter."""
        with self._lock:
            self._counter[name] += number

    def as_dict(self) -> dict[str, int]:
        """All counters, those at 0 included."""
        names = ("graded", "timeouts", "deaths", "respawns", "retried", "failed")
        with self._lock:
            return {name: self._counter[name] for name in names}


class Slot:
    """Runs requests one after another; only one thread uses it."""

    def __init__(self, forkserver: Forkserver, counts: Counts) -> None:
        self._forkserver = forkserver
        self._counts = counts
        self._worker: Worker | None = None
        self._served = 0

    def run(self, request: Mapping[str, Any], deadline_s: float) -> GradeResult:
        """The result of a request; after a failure the result of a second try on a fresh worker.

        ``EnvironmentFault`` when no worker can be had: then nothing is known about the sample.
        """
        result = self._attempt(request, deadline_s)
        if result.status == "error" and result.code in RETRIED:
            self._counts.add("retried")
            if result.code == "environment_exception":  # the others have been replaced
                self._replace_worker()
            result = self._attempt(request, deadline_s)
            if result.status == "error":
                self._counts.add("failed")
        self._counts.add("graded")
        return result

    def end_worker(self) -> str:
        """Ends this slot's worker, if it has one, and says how."""
        worker, self._worker = self._worker, None
        return self._forkserver.end(worker) if worker else ""

    def _attempt(self, request: Mapping[str, Any], deadline_s: float) -> GradeResult:
        worker = self._ready_worker()
        try:
            send(worker.channel, {**request, "deadline_s": deadline_s}, deadline_s)
            await_answer(worker, deadline_s)
            (result,) = results_from_json({"items": [receive(worker.channel, deadline_s)]}, 1)
        except TimeoutError:
            self._counts.add("timeouts")
            self._replace_worker()
            return failed("timeout", f"no grade within {deadline_s:g} s")
        except (OSError, ValueError) as error:
            self._counts.add("deaths")
            how = self._replace_worker()
            return failed("worker_died", f"the grading worker {how}: {error}")
        return result

    def _ready_worker(self) -> Worker:
        if self._served >= REQUESTS_PER_WORKER:
            self.end_worker()
        if self._worker is None:
            self._worker = self._forkserver.spawn()
            self._served = 0
        self._served += 1
        return self._worker

    def _replace_worker(self) -> str:
        """Ends the worker and says how; the next one is forked at once, not on the next request's time."""
        how = self.end_worker()
        self._counts.add("respawns")
        with contextlib.suppress(EnvironmentFault):  # told by the next request's own attempt
            self._ready_worker()
        return how
