"""What the caller wants to know; a module that does not come back costs its own answer and no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.environments.loading.supervise import LOAD_SECONDS, Answer, run_in_child
from megatron_rl.errors import ConfigError

MAX_FAILURES = 10
"""Children that may fail before the rest is not looked at: each may take a whole deadline."""


@dataclass(frozen=True)
class Found:
    """All environments there are."""

    environments: Mapping[str, str]
    """Descriptions by name."""
    broken: Mapping[str, str]
    """What is wrong with the others, one line each, by name."""
    tracebacks: Mapping[str, str]
    """Of those that raised."""


@dataclass(frozen=True)
class Inspection:
    """The self-test of one environment."""

    title: str
    checks: Sequence[tuple[str, bool | None, str]]
    """Name, verdict (None: there is nothing to check) and detail."""
    problems: tuple[str, ...]
    """Why there is none."""
    output: str
    """The end of what it printed."""


@dataclass(frozen=True)
class Surveyed:
    """What a run's checks ask about an environment whose tasks are sound."""

    name: str
    evaluation_only: bool
    test_tasks: int
    first_chat: str | None
    """The id of a task whose prompt is chat messages."""
    demonstrates: bool
    """Whether it has demonstrations; False also if nobody asked."""
    overlong: tuple[int, int, int] | None
    """Buffer, longest and longest free response in tokens, of an environment that reads a data set."""


def found(seconds: float = LOAD_SECONDS) -> Found:
    """Imports every environment there is."""
    failures: dict[str, str] = {}
    while True:
        answer = run_in_child("find_all", {"skip": sorted(failures)}, seconds)
        if answer.failed_at is None or not answer.failed_at.key or len(failures) >= MAX_FAILURES:
            break
        failures[answer.failed_at.key] = answer.failure
    _raise_problems(answer)
    raised = {name: (reason, trace) for name, reason, trace in answer.result["broken"]}
    broken = failures | {name: f"cannot be imported: {reason}" for name, (reason, _) in raised.items()}
    traces = {name: trace for name, (_, trace) in raised.items()}
    return Found(answer.result["environments"], dict(sorted(broken.items())), traces)


def inspected(name: str, options: Sequence[str], limit: int, seconds: float = LOAD_SECONDS) -> Inspection:
    """Runs the self-test of the environment ``name`` with ``options`` such as ``max_terms=6``."""
    answer = run_in_child("inspect", {"name": name, "options": list(options), "limit": limit}, seconds)
    problems = (answer.failure,) if answer.failed_at is not None else answer.problems
    result = answer.result or {"title": "", "checks": []}
    return Inspection(result["title"], [tuple(row) for row in result["checks"]], problems, answer.output)


def surveyed(path: str | Path, seconds: float = LOAD_SECONDS, demonstrations: bool = False) -> list[Surveyed]:
    """The environments of the list at ``path``; one ``ConfigError`` carries all problems found."""
    failures: dict[int, str] = {}
    while True:
        arguments = {"path": str(path), "skip": sorted(failures), "demonstrations": demonstrations}
        answer = run_in_child("survey", arguments, seconds)
        if answer.failed_at is None or not answer.failed_at.key.isdigit() or len(failures) >= MAX_FAILURES:
            break
        failures[int(answer.failed_at.key)] = answer.failure
    problems = [failures[entry] for entry in sorted(failures)]
    problems += [answer.failure] if answer.failed_at is not None else answer.problems
    if problems:
        raise ConfigError(problems)
    return [Surveyed(**row | {"overlong": row["overlong"] and tuple(row["overlong"])}) for row in answer.result]


def _raise_problems(answer: Answer) -> None:
    problems = [answer.failure] if answer.failed_at is not None else answer.problems
    if problems:
        raise ConfigError(problems)
