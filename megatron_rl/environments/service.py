"""What the server's routes do: lists of tasks that are read once, samples that are graded or run."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flask_restful import abort

from megatron_rl.environments.base import Environment, GroupEnvironment, HarnessEnvironment, suggestion
from megatron_rl.environments.checks import read_rows
from megatron_rl.environments.child import HARNESS_PROCESSES, LOAD_SECONDS
from megatron_rl.environments.config import EnvironmentSpec
from megatron_rl.environments.results import judge, judge_group
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Grade, HarnessRun, Item, Split, Task, Transcript

WORKING = 8
"""Grade requests worked on at once: enough to keep the workers busy, and few, because one whose samples wait behind
many that hang runs into its client's timeout. One that is turned away waits at its client, which starts no timeout."""

logger = logging.getLogger(__name__)


class Service:
    """The environments of one server and what was done with them; for any number of threads."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        token: str,
        specs: Mapping[str, EnvironmentSpec] | None = None,
        list_seconds: float = LOAD_SECONDS,
        harness_processes: int = HARNESS_PROCESSES,
    ) -> None:
        """Samples of environments that have a spec, and are not ``in_process``, are graded in worker processes."""
        self.environments, self.token, self.specs = dict(environments), token, specs or {}
        self.places, self.group_places = (threading.BoundedSemaphore(WORKING) for _ in range(2))
        others = [name for name, each in self.environments.items() if not each.in_process]
        harnesses = [name for name in others if isinstance(self.environments[name], HarnessEnvironment)]
        callers = [name for name in others if self._may_wait(name)]
        graders = [name for name in others if name not in (*harnesses, *callers)]
        self.pool = WorkerPool(**self._needs(graders)) if graders else None
        self.harnesses = WorkerPool.for_harnesses(harness_processes, **self._needs(harnesses)) if harnesses else None
        self.callers = WorkerPool.for_harnesses(WORKING, once=False, **self._needs(callers)) if callers else None
        self.pools = [pool for pool in (self.pool, self.harnesses, self.callers) if pool is not None]
        self._list_seconds = list_seconds
        self._lists: dict[tuple[str, str, Split], Sequence[Any]] = {}
        self._reading, self._in_turn = threading.Lock(), threading.Lock()

    def _needs(self, names: Sequence[str]) -> dict[str, Any]:
        """What a pool is told about the environments of these names."""
        variables = {variable for name in names for variable in self.environments[name].variables}
        specs = [self.specs[name] for name in names]
        return {"environments": [(spec.reference, dict(spec.options)) for spec in specs], "variables": variables}

    def environment(self, name: str) -> Environment:
        """Return the environment of that name; answers 404 with the nearest names otherwise."""
        if name not in self.environments:
            abort(404, message=f"unknown environment {name!r}{suggestion(name, self.environments)}")
        return self.environments[name]

    def rows(self, name: str, what: str, split: Split) -> Sequence[Any]:
        """Read all ``tasks`` or ``demonstrations`` of a split at the first call; answers 500 for unusable ones."""
        environment, key = self.environment(name), (name, what, split)
        with self._reading:  # two requests at start would both read the data set
            if key not in self._lists:
                try:
                    self._lists[key] = read_rows(environment, what, split, self._list_seconds)
                except EnvironmentFault as fault:
                    logger.exception("a list could not be read")
                    abort(500, message=f"{what} of {name!r}: {fault}")
            return self._lists[key]

    def judge(self, name: str, items: Sequence[Item]) -> list[Grade]:
        """Return one result for each sample or step, in order; ``EnvironmentFault`` when nothing can be graded now."""
        environment = self.environment(name)
        if isinstance(environment, HarnessEnvironment):
            abort(422, message=f"{name!r} is a harness, whose samples are not graded; use its route /run")
        if environment.in_process:
            with self._in_turn:  # two threads that compute at once are no faster, and delay the health route
                return [judge(environment, item) for item in items]
        spec, lowest, deadline = self.specs[name], environment.reward_range[0], environment.grade_deadline
        pool, served = self.callers if self._may_wait(name) else self.pool, spec.mcp and environment.mcp_served
        return pool.grade(spec.reference, spec.options, items, deadline, lowest, served)

    def judge_group(self, name: str, task: Task, transcripts: Sequence[Transcript]) -> list[Grade]:
        """Return one result for each sample of a group that is graded together, in order; see `judge`."""
        environment, spec = self.environment(name), self.specs.get(name)
        if not isinstance(environment, GroupEnvironment):
            abort(422, message=f"{name!r} grades each answer alone; use its route /grade")
        if environment.in_process:
            with self._in_turn:
                return judge_group(environment, task, transcripts)
        deadline = environment.grade_deadline
        return self.callers.grade_group(spec.reference, spec.options, task, transcripts, deadline)

    def _may_wait(self, name: str) -> bool:
        """Whether its graders wait for others: for a server of tools, or for a judge who compares answers."""
        return self.specs[name].mcp is not None or isinstance(self.environments[name], GroupEnvironment)

    def run(self, name: str, runs: Sequence[HarnessRun], gone: Callable[[], bool]) -> list[Grade]:
        """Return one result for each sample of a harness, in order; none when whoever asked is ``gone``."""
        environment = self.environment(name)
        if not isinstance(environment, HarnessEnvironment):
            abort(422, message=f"{name!r} is no harness; its samples are graded by its route /grade")
        spec = self.specs[name]
        return self.harnesses.run(spec.reference, spec.options, runs, environment.run_deadline, gone)

    def counters(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for pool in self.pools:
            counts.update(pool.counters())  # a sum of counters would leave out what never happened
        return counts

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
