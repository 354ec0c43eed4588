"""The environments of one server, with the tasks of each listed once and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.environments.base import Environment
from megatron_rl.environments.checks import bounded, row_problems
from megatron_rl.errors import ConfigError, EnvironmentFault, one_line, shorten
from megatron_rl.types import Demonstration, Split, Task


class Catalog:
    """Looks up environments and pages through their tasks and demonstrations."""

    def __init__(self, environments: Mapping[str, Environment], seconds: float) -> None:
        """Reading one list may take ``seconds``."""
        self.environments = dict(environments)
        self._seconds = seconds
        self._lists: dict[tuple[str, str, Split], Sequence[Any]] = {}
        self._lock = threading.Lock()

    def tasks(self, name: str, split: Split) -> Sequence[Task]:
        """All tasks of a split, listed at the first call; a row that is no valid task is a fault."""
        return self._listed("tasks", name, split, _all_tasks)

    def demonstrations(self, name: str, split: Split) -> Sequence[Demonstration]:
        """All demonstrations of a split, in the order of the curriculum."""
        return self._listed("demonstrations", name, split, _all_demonstrations)

    def _listed(self, what: str, name: str, split: Split, read: Callable) -> Sequence[Any]:
        key = (what, name, split)
        with self._lock:  # two requests at start would both read the data set
            if key not in self._lists:
                try:
                    self._lists[key] = read(self.environments[name], split, self._seconds)
                except (ConfigError, EnvironmentFault) as fault:
                    raise EnvironmentFault(f"{what} of {name!r}: {fault}") from fault
                except Exception as error:  # an author's code may raise anything
                    reason = one_line(f"{type(error).__name__}: {error}")
                    raise EnvironmentFault(f"{what} of {name!r}: {split} raises {reason}") from error
            return self._lists[key]


def _all_tasks(environment: Environment, split: Split, seconds: float) -> Sequence[Task]:
    tasks: dict[str, Task] = {}
    for number, row in enumerate(bounded(environment.tasks(split), seconds)):
        for problem in row_problems(row):
            raise EnvironmentFault(f"{split} row {number} {problem}")
        if row.id in tasks:
            raise EnvironmentFault(f"{split} row {number} has the id {shorten(row.id)} of an earlier row")
        tasks[row.id] = row
    return tuple(tasks.values())


def _all_demonstrations(environment: Environment, split: Split, seconds: float) -> Sequence[Demonstration]:
    demonstrations = tuple(bounded(environment.demonstrations(split), seconds))
    for number, row in enumerate(demonstrations):
        if not isinstance(row, Demonstration) or not isinstance(row.completion, str):
            raise EnvironmentFault(f"{split} row {number} is not a Demonstration with a text")
    return demonstrations
