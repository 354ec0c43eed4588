"""Graders: text in, reward and reason out.

A file here that defines ``judge(completion, gold) -> Grade`` and ``REWARDS``, the lowest and the highest, is a kind;
with ``NEEDS_WORKER = True`` it only runs where it can be killed.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence

from megatron_rl.environments.grading.expressions import arithmetic_value
from megatron_rl.environments.limits import in_worker
from megatron_rl.environments.workers import DEADLINE_S, WorkerPool
from megatron_rl.errors import EnvironmentFault
from megatron_rl.registry import GRADERS
from megatron_rl.types import Grade, GradeResult

__all__ = ["Grader", "arithmetic_value", "grade", "grade_many"]

Grader = Callable[[str, str], Grade]
"""From completion and gold answer."""

_lock = threading.Lock()
_pools: dict[int, WorkerPool] = {}
"""The pool of this process; a forked child has another process id and makes its own."""


def grade(kind: str, completion: str, gold: str) -> Grade:
    """The verdict of the grader ``kind`` on ``completion``, from any thread.

    What can hang (``math``) runs in a worker process, unless this is one. ``ConfigError`` for an unknown kind,
    ``ValueError`` or ``EnvironmentFault`` for a gold answer that the kind cannot read.
    """
    module = GRADERS.module(kind)
    if getattr(module, "NEEDS_WORKER", False) and not in_worker():
        return grade_many(kind, [(completion, gold)])[0]
    return module.judge(completion, gold)


def grade_many(kind: str, pairs: Sequence[tuple[str, str]], deadline_s: float = DEADLINE_S) -> list[Grade]:
    """The verdicts on pairs of completion and gold answer, in order, all from worker processes.

    A completion that twice takes longer than ``deadline_s`` seconds gets the lowest reward and the status
    ``timeout``; one that kills its worker twice the lowest reward, ``unparsable`` and the metric
    ``worker_died``.
    """
    module = GRADERS.module(kind)
    if in_worker():
        return [module.judge(completion, gold) for completion, gold in pairs]
    requests = [{"kind": kind, "completion": completion, "gold": gold} for completion, gold in pairs]
    return [_grade(result, module.REWARDS[0]) for result in _pool().run(requests, deadline_s)]


def _grade(result: GradeResult, lowest: float) -> Grade:
    if result.status == "ok":
        return Grade(result.reward, result.metrics, result.verdict, result.extracted)
    if result.code == "timeout":
        return Grade(lowest, status="timeout")
    if result.code == "worker_died":
        return Grade(lowest, {"worker_died": 1.0}, "unparsable")
    raise EnvironmentFault(result.message)


def _pool() -> WorkerPool:
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = pool = WorkerPool()
            atexit.register(pool.close)
        return _pools[os.getpid()]
