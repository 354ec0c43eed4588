"""Walks an environment's tasks and says what is wrong with them, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from megatron_rl.environments.base import Environment
from megatron_rl.environments.wire import check_bounds, dumps
from megatron_rl.errors import ConfigError
from megatron_rl.types import Split, Task

MAX_PROBLEMS = 20
"""Per environment; a data set with one wrong column would give one line a row."""


def task_problems(environment: Environment) -> list[str]:
    """All that is wrong with the environment's tasks; empty when they can be used."""
    splits: tuple[Split, ...] = ("test",) if environment.evaluation_only else ("train", "test")
    first_seen: dict[str, str] = {}
    # a data set that cannot be read says the same of every split
    problems = list(
        dict.fromkeys(problem for split in splits for problem in _walk(environment, split, first_seen))
    )
    if not first_seen and not problems:
        problems.append("there are no tasks")
    hidden = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], f"... and {hidden} more"] if hidden > 0 else problems


def row_problems(row: object) -> list[str]:
    """What is wrong with one row of ``Environment.tasks``; empty for a usable task."""
    if not isinstance(row, Task):
        return [_not_a_task(row)]
    problems = []
    if not isinstance(row.id, str) or not row.id:
        problems.append(f"has the id {row.id!r}; it must be a non-empty string")
    problems += _prompt_problems(row.prompt)
    problems += _data_problems(row.data)
    return problems or _bound_problems(row)


def _walk(environment: Environment, split: Split, first_seen: dict[str, str]) -> Iterator[str]:
    row_number = -1
    try:
        for row_number, row in enumerate(environment.tasks(split)):
            where = f"{split} row {row_number}"
            yield from (f"{where} {problem}" for problem in row_problems(row))
            if isinstance(row, Task) and isinstance(row.id, str):
                earlier = first_seen.setdefault(row.id, where)
                if earlier != where:
                    yield f"{where} has the id {row.id!r} of {earlier}; ids must be unique"
    except ConfigError as error:  # it says itself where and what
        yield from error.problems
        return
    except Exception as error:  # noqa: BLE001 - an author's code may raise anything
        yield f"{split} row {row_number + 1} raises {type(error).__name__}: {error}"
        return
    needed = environment.evaluation_only or split == "train"
    if row_number < 0 and needed:
        yield f"there are no {split} tasks"


def _not_a_task(row: object) -> str:
    if not isinstance(row, Mapping):
        return f"is a {type(row).__name__}, not a Task"
    missing = [key for key in ("id", "prompt") if key not in row]
    lacks = f"; it lacks {', '.join(missing)}" if missing else ""
    return f"is a {type(row).__name__}, not a Task{lacks}; it has {', '.join(map(str, row)) or 'nothing'}"


def _bound_problems(row: Task) -> list[str]:
    try:  # its request for a grade nests it three levels deeper
        check_bounds([[[row.id, row.prompt, row.data]]])
    except ValueError as error:
        return [f"cannot be sent: {error}"]
    return []


def _prompt_problems(prompt: object) -> list[str]:
    if isinstance(prompt, str):
        return [] if prompt.strip() else ["has an empty prompt"]
    if not isinstance(prompt, (tuple, list)):
        return [f"has a prompt of type {type(prompt).__name__}; it must be text or a tuple of messages"]
    problems = [] if prompt else ["has an empty prompt"]
    for index, message in enumerate(prompt):
        present = message if isinstance(message, Mapping) else {}
        missing = [key for key in ("role", "content") if not isinstance(present.get(key), str)]
        if missing:
            has = ", ".join(map(str, present)) or type(message).__name__
            problems.append(f"has a message {index} without text for {' and '.join(missing)}; it has {has}")
    return problems


def _data_problems(data: object) -> list[str]:
    if not isinstance(data, Mapping):
        return [f"has data of type {type(data).__name__}; it must be a mapping"]
    problems = []
    for key, value in data.items():
        try:
            same = isinstance(key, str) and json.loads(dumps(value)) == value
        except (TypeError, ValueError) as error:
            problems.append(f"has data {key!r} that is not JSON: {error}")
            continue
        if not same:  # a tuple becomes a list and an integer key a string: the grader would see another value
            problems.append(f"has data {key!r} that JSON does not return unchanged ({type(value).__name__})")
    return problems
