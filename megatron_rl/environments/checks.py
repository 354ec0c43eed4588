"""Walks an environment's tasks and says what is wrong with them, row by row."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.environments.base import Environment
from megatron_rl.environments.loader import Begin, ignore
from megatron_rl.environments.sandbox import sandbox_problem
from megatron_rl.environments.wire import WireError, demonstration_to_json, messages_of
from megatron_rl.errors import ConfigError, EnvironmentFault, one_line, shorten
from megatron_rl.json_text import check_bounds, dumps
from megatron_rl.types import Demonstration, Message, Prompt, Split, Task

MAX_PROBLEMS = 20
"""Per environment; a data set with one wrong column would give one line a row."""
MAX_ROWS = 1_000_000
"""Of a split; every rank holds all of them. A generator without an end must not fill its memory."""
MAX_BYTES = 2 * 2**30
"""Characters of a split's rows."""
MAX_SHAPES, MAX_TEXT, MAX_CHAT = 100, 200, 100_000
"""Shapes of an environment's chats, characters of a message of one, and of all: what the chat template is tried on."""


Chats = dict[str, tuple[str, Sequence[Message]]]
"""By split and roles: the first row that has them, and its messages, none of a text. A chat template usually takes all
rows with the same roles, or refuses all."""


def note_chat(chats: Chats, split: str, row: int, prompt: Prompt) -> None:
    """Add a row with new roles, its texts cut."""
    messages = [] if isinstance(prompt, str) else prompt
    roles = ", ".join(message["role"] for message in messages) or "text"
    if f"{split} {roles}" not in chats and len(chats) < MAX_SHAPES:
        messages = [{**message, "content": (message["content"] or "")[:MAX_TEXT]} for message in messages]
        if len(dumps(messages)) <= MAX_CHAT:
            chats[f"{split} {roles}"] = (f"{split} row {row} of {one_line(roles, 80)}", messages)


@dataclass
class TaskSurvey:
    problems: list[str] = field(default_factory=list)
    """One line each; empty when the tasks can be used."""
    counts: Counter[Split] = field(default_factory=Counter)
    """Rows of each split."""
    chats: Chats = field(default_factory=dict)


class TooMuch(ConfigError):
    """A list that is longer, larger or slower than it may be."""


def splits_of(environment: Environment) -> tuple[Split, ...]:
    return ("test",) if environment.evaluation_only else ("train", "test")


def survey_tasks(environment: Environment, begin: Begin = ignore) -> TaskSurvey:
    """Reads all tasks of the splits that a run reads; all, so that the last line can tell the number of problems."""
    survey, first_seen = TaskSurvey(), {}
    if environment.needs_sandbox and (problem := sandbox_problem()):
        survey.problems.append(problem)
    for split in splits_of(environment):
        begin(f"its {split} tasks were read")
        row, found, told = None, [], set(survey.problems)
        for row, problems in _walk(environment, "tasks", split, first_seen):
            survey.counts[split] += 1
            if not problems:
                note_chat(survey.chats, split, survey.counts[split] - 1, row.prompt)
            # a data set that cannot be read says the same of every split
            found += [problem for problem in problems if problem not in told]
        survey.problems += map(one_line, found[:MAX_PROBLEMS])
        if len(found) > MAX_PROBLEMS:
            survey.problems.append(f"... and {len(found) - MAX_PROBLEMS} more")
        if not survey.counts and not survey.problems:
            survey.problems.append(f"there are no {split} tasks")
        if isinstance(row, TooMuch):
            break  # another split is likely no shorter
    return survey


def read_rows(environment: Environment, what: str, split: Split, seconds: float) -> tuple[object, ...]:
    """Read all ``tasks`` or ``demonstrations`` of a split; ``EnvironmentFault`` names the first unusable one."""
    rows = []
    for row, problems in _walk(environment, what, split, {}, seconds):
        if problems:
            raise EnvironmentFault(problems[0])
        rows.append(row)
    return tuple(rows)


def _walk(
    environment: Environment, what: str, split: Split, first_seen: dict[str, str], seconds: float | None = None
) -> Iterator[tuple[object, list[str]]]:
    """Each row with what is wrong with it; the error in place of a row that could not be had."""
    number, size, start = -1, 0, time.monotonic()
    try:
        for number, row in enumerate(getattr(environment, what)(split)):
            if number >= MAX_ROWS:
                raise TooMuch([f"has more than {MAX_ROWS:,} rows, or no end; give fewer"])
            if seconds is not None and time.monotonic() - start > seconds:
                raise TooMuch([f"has given {number + 1:,} rows in {seconds:g} s and goes on; give fewer, or faster"])
            where = f"{split} row {number}"
            problems = _task_problems(row) if what == "tasks" else _demonstration_problems(row)
            named = isinstance(row, Task) and isinstance(row.id, str)
            if named and first_seen.setdefault(row.id, where) != where:
                problems.append(f"has the id {shorten(row.id)} of {first_seen[row.id]}; ids must be unique")
            size += 0 if problems else len(dumps(vars(row) if what == "tasks" else demonstration_to_json(row)))
            if size > MAX_BYTES:
                raise TooMuch([f"has more than {MAX_BYTES / 2**30:g} GiB in its first {number + 1:,} rows; give less"])
            yield row, [f"{where} {problem}" for problem in problems]
    except TooMuch as error:
        yield error, [f"{split} {error}"]
    except ConfigError as error:  # it says itself where and what
        yield error, error.lines
    except Exception as error:  # noqa: BLE001 - an author's code may raise anything
        yield error, [f"{split} row {number + 1} raises {type(error).__name__}: {error}"]


def _demonstration_problems(row: object) -> list[str]:
    right = isinstance(row, Demonstration) and isinstance(row.completion, str)
    return [] if right else ["is not a Demonstration with a text"]


def _task_problems(row: object) -> list[str]:
    if isinstance(row, Mapping):
        missing = [key for key in ("id", "prompt") if key not in row]
        lacks = f"; it lacks {', '.join(missing)}" if missing else ""
        return [f"is a {type(row).__name__}, not a Task{lacks}; it has {', '.join(map(str, row)) or 'nothing'}"]
    if not isinstance(row, Task):
        return [f"is a {type(row).__name__}, not a Task"]
    problems = []
    if not isinstance(row.id, str) or not row.id:
        problems.append(f"has the id {shorten(row.id)}; it must be a non-empty string")
    problems += _prompt_problems(row.prompt)
    try:  # its request for a grade nests it three levels deeper
        check_bounds([[[row.id, row.prompt, row.data]]])
    except ValueError as error:
        return [*problems, f"cannot be sent: {error}"]
    return problems + _data_problems(row.data)


def _prompt_problems(prompt: object) -> list[str]:
    if isinstance(prompt, str):
        return [] if prompt.strip() else ["has an empty prompt"]
    if not isinstance(prompt, (tuple, list)):
        return [f"has a prompt of type {type(prompt).__name__}; it must be text or a tuple of messages"]
    try:
        return [] if messages_of(prompt, "prompt") else ["has an empty prompt"]
    except WireError as error:
        return [f"has a prompt in which {error}"]


def _data_problems(data: object) -> list[str]:
    if not isinstance(data, Mapping):
        return [f"has data of type {type(data).__name__}; it must be a mapping"]
    problems = []
    for key, value in data.items():
        try:
            same = isinstance(key, str) and (isinstance(value, str) or json.loads(dumps(value)) == value)
        except (TypeError, ValueError) as error:
            problems.append(f"has data {shorten(key)} that is not JSON: {error}")
            continue
        if not same:  # a tuple becomes a list and an integer key a string: the grader would see another value
            problems.append(f"has data {shorten(key)} that JSON does not return unchanged ({type(value).__name__})")
    return problems
