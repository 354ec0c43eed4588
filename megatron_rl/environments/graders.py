"""Where a server's samples are graded and steps taken: in its threads, or in worker processes that can be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.environments.base import Environment
from megatron_rl.environments.config import EnvironmentSpec
from megatron_rl.environments.grading.sample import judge_item
from megatron_rl.environments.pool import WorkerPool
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import GradeResult, Item

TURN_SECONDS = 30.0
"""Longest wait for a grader in process before ours; one that hangs keeps its turn for good."""

Items = Sequence[Item]
GradeSamples = Callable[[str, Environment, Items], list[GradeResult]]
"""From the name in the list, the environment and its samples to one result each."""


def grade_in_process(name: str, environment: Environment, items: Items) -> list[GradeResult]:
    """Grades in the calling thread, which a grader that hangs holds forever."""
    return [judge_item(environment, item) for item in items]


class PooledGrading:
    """Grades in worker processes, except the environments that are trusted to be graded in process."""

    def __init__(self, specs: Mapping[str, EnvironmentSpec], environments: Mapping[str, Environment]) -> None:
        """Starts a pool when at least one of ``environments`` needs it."""
        self._specs = dict(specs)
        pooled = [specs[name] for name, environment in environments.items() if not environment.in_process]
        prepared = [(spec.reference, spec.options) for spec in pooled]
        self._pool = WorkerPool(environments=prepared) if pooled else None
        self._turn = threading.Lock()

    def __call__(self, name: str, environment: Environment, items: Items) -> list[GradeResult]:
        """One result for each sample, in order; ``EnvironmentFault`` when nothing can be graded now."""
        if self._pool is None or environment.in_process:
            return self._in_turn(name, environment, items)
        spec = self._specs[name]
        lowest, deadline = environment.reward_range[0], environment.grade_deadline
        return self._pool.grade(spec.reference, spec.options, items, lowest=lowest, deadline_s=deadline)

    def _in_turn(self, name: str, environment: Environment, items: Items) -> list[GradeResult]:
        """Two threads that compute at once are no faster, and every further one delays the health route."""
        if not self._turn.acquire(timeout=TURN_SECONDS):
            raise EnvironmentFault(f"a grader in process has taken more than {TURN_SECONDS:g} s")
        try:
            return grade_in_process(name, environment, items)
        finally:
            self._turn.release()

    def counters(self) -> dict[str, int]:
        """The pool's counters; empty when every environment is graded in process."""
        return self._pool.counters() if self._pool else {}

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.close()
