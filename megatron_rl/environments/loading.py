"""Author's modules in a process of their own: listed, tried out, and surveyed for a run, whatever they do there.

`list_environments`, `self_test`, `survey_list` and `data_size` ask; `find_all`, `inspect`, `survey` and `measure` are
what the process does.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.environments.base import Environment
from megatron_rl.environments.checks import MAX_ROWS, TaskSurvey, note_chat, survey_tasks
from megatron_rl.environments.child import LOAD_SECONDS, Answer, Report, answer_parent, run_in_child, run_in_children
from megatron_rl.environments.config import EnvironmentSpec, load_environment_specs
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.loader import discover, find_environment, reason_of
from megatron_rl.environments.selftest import run_checks
from megatron_rl.environments.wire import ServedEnvironment
from megatron_rl.errors import ConfigError, one_line, problem_lines, shorten
from megatron_rl.types import Message
from megatron_rl.user_files import is_entry

PROGRAM = "megatron_rl.environments.loading"
MOST_LONG = 1_000
MAX_DETAIL = 2_000
"""Characters of a line of the self-test."""


@dataclass(frozen=True)
class Surveyed(ServedEnvironment):
    """An environment whose tasks are sound, and what the checks of a run ask besides."""

    test_tasks: int = 0
    demonstrates: bool = False
    """Whether it has demonstrations; False also if nobody asked."""
    overlong: Sequence[int] | None = None
    """Buffer, longest and longest free response in tokens, of an environment that reads a data set."""
    chats: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    """A row for each sequence of roles, by ``train row 3 of system, user``; demonstrations too. Empty for text."""

    @property
    def first_chat(self) -> str | None:
        """Return the first row that is chat messages."""
        return next((row for row, messages in self.chats.items() if messages), None)


@dataclass(frozen=True)
class DataSize:
    """The lengths and counts of a data set, from which a first run derives its settings."""

    tasks: int
    """To train on."""
    prompts: Sequence[tuple[int, str | Sequence[Message]]]
    """The longest ones in characters, at most 1,000, each with the number of its row."""
    answer: str
    """The longest right answer or completion, in characters; "" where there is none."""


def list_environments(seconds: float = LOAD_SECONDS) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return the description of every environment by name, and the problem and traceback of each broken one."""
    answer, failures = run_in_children(PROGRAM, "find_all", {}, seconds)
    if answer.problems:
        raise ConfigError(answer.problems)
    broken = {name: (f"cannot be imported: {why}", trace) for name, (why, trace) in answer.result["broken"].items()}
    broken |= {name: (problem, "") for name, problem in failures.items()}
    return answer.result["environments"], dict(sorted(broken.items()))


def find_all(report: Report, skip: Collection[str]) -> dict[str, Any]:
    """Return names and descriptions of all environments, and why some cannot be imported."""

    def begin(module: str) -> None:
        report(module, f"environment {module!r}", "it was imported")

    environments, errors = discover(begin, skip)
    names = {name: one_line(str(environment.description())) for name, environment in environments.items()}
    broken = {name: [reason_of(error), "".join(traceback.format_exception(error))] for name, error in errors.items()}
    return {"environments": names, "broken": broken}


def self_test(name: str, options: Sequence[str], limit: int, seconds: float = LOAD_SECONDS) -> Answer:
    """Run the self-test of the environment ``name`` with ``options`` such as ``max_terms=6``, or of those of a list.

    The results have a ``title`` and ``checks``: rows of name, verdict (None: there is nothing to check) and detail.
    """
    return run_in_child(PROGRAM, "inspect", {"name": name, "options": list(options), "limit": limit}, seconds)


def inspect(report: Report, name: str, options: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """Run the self-test of one environment, or of the entries of a list."""

    def begin(doing: str) -> None:
        report(name, f"environment {name!r}", doing)

    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what a data set was left without
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)  # else a line for every call of a harness
    is_list = is_entry(name) or name.endswith((".yaml", ".yml"))
    if is_list and options:
        raise ConfigError([f"--option {options[0]} is for an environment's name; write it into args of the list"])
    begin("it was read")
    found = load_environment_specs(name) if is_list else [find_environment(name, begin)]
    tested = []
    for each in found:
        begin("it was set up")
        environment = each.create() if is_list else each.from_options(_values(options))
        checks = run_checks(environment, limit, begin)
        rows = [[check.name, check.passed, one_line(check.detail, MAX_DETAIL)] for check in checks]
        tested.append({"title": one_line(f"{environment.name}: {environment.description()}"), "checks": rows})
    return tested


def _values(pairs: Sequence[str]) -> dict[str, object]:
    """``["max_terms=6"]`` as the YAML list would read it."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ConfigError([f"--option {pair} has no value; write KEY=VALUE" for pair in wrong])
    values = {}
    for key, _, text in (pair.partition("=") for pair in pairs):
        try:
            values[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            advice = f"put a text with braces or colons into quotes, as in --option '{key}=\"...\"'"
            raise ConfigError([f"--option {key}={shorten(text)} is no value of YAML; {advice}"]) from None
    return values


def survey_list(path: str | Path, seconds: float = LOAD_SECONDS, demonstrations: bool = False) -> list[Surveyed]:
    """Return the environments of the list at ``path``; one ``ConfigError`` carries all problems found."""
    arguments = {"path": str(path), "demonstrations": demonstrations}
    answer, failures = run_in_children(PROGRAM, "survey", arguments, seconds)
    lines = sorted(failures, key=lambda where: int(where.rpartition(":")[2]))
    problems = [*(failures[where] for where in lines), *answer.problems]
    if problems:
        raise ConfigError(problems)
    return [Surveyed.from_json(row) for row in answer.result]


def survey(report: Report, path: str, skip: Collection[str] = (), demonstrations: bool = False) -> list[dict[str, Any]]:
    """Collect what a run's checks ask about each environment of a list; ``demonstrations`` includes theirs."""

    def begin(where: str, name: str, doing: str) -> None:
        report(where, f"{where}: environment {shorten(name)}", doing)

    sound, problems = [], []
    report("", str(path), "it was read")
    for spec in load_environment_specs(path, skip, begin):
        begin_part = partial(begin, spec.where, spec.name)
        try:
            begin_part("it was set up")
            environment = spec.create()
            tasks = survey_tasks(environment, begin_part)
            sound.append((spec, environment, tasks))
            faults = tasks.problems
        except ConfigError as error:
            faults = error.lines
        problems += [f"{spec.name}: {fault}" for fault in faults]
    if problems:
        raise ConfigError(problem_lines(problems))
    return [asdict(_surveyed(report, *each, demonstrations)) for each in sound]


def _surveyed(
    report: Report, spec: EnvironmentSpec, environment: Environment, tasks: TaskSurvey, demonstrations: bool
) -> Surveyed:
    demonstrates, overlong = False, None
    if demonstrations and not environment.evaluation_only:
        report("", f"environment {spec.name!r}", "its demonstrations were read")
        try:
            for row, shown in enumerate(islice(environment.demonstrations("train"), MAX_ROWS)):
                demonstrates, prompt = True, shown.task.prompt
                answer = {"role": "assistant", "content": shown.completion}
                later = [message for turn in shown.later for message in (answer, *turn.messages)]
                note_chat(tasks.chats, "demonstration", row, prompt if isinstance(prompt, str) else (*prompt, *later))
        except Exception as error:
            said = one_line(f"{type(error).__name__}: {error}")
            raise ConfigError([f"{spec.name}: demonstrations raises {said}"]) from error
    if isinstance(environment, DatasetEnvironment):
        overlong = (environment.overlong.buffer, environment.overlong.max_tokens, environment.overlong.free_tokens)
    served = vars(spec.served(environment))
    return Surveyed(**served, test_tasks=tasks.counts["test"], demonstrates=demonstrates, overlong=overlong,
                    chats=dict(tasks.chats.values()))  # fmt: skip


def data_size(entry: str, demonstrations: bool, seconds: float = LOAD_SECONDS) -> DataSize:
    """Return the size of what the environment ``entry`` trains on: its tasks, or its ``demonstrations``.

    Raises:
        ConfigError: it cannot be read; says why.
    """
    answer = run_in_child(PROGRAM, "measure", {"path": entry, "demonstrations": demonstrations}, seconds)
    if answer.problems:
        raise ConfigError(answer.problems)
    return DataSize(**answer.result)


def measure(report: Report, path: str, demonstrations: bool) -> dict[str, Any]:
    """See `data_size`."""
    report("", "the data", "it was read")
    [spec] = load_environment_specs(path)
    environment = spec.create()
    rows = list(environment.learnt("train") if demonstrations else environment.problems("train"))
    said = ([row.solution, *(turn.completion for turn in row.later)] for row in rows)
    answers = map(" ".join, said) if demonstrations else (str(row.task.data.get("gold", "")) for row in rows)
    longest = nlargest(MOST_LONG, ((row.number, row.prompt) for row in rows), key=_characters)
    return {"tasks": len(rows), "prompts": longest, "answer": max(answers, key=len, default="")}


def _characters(numbered: tuple[int, str | Sequence[Message]]) -> int:
    prompt = numbered[1]
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


if __name__ == "__main__":
    answer_parent({"find_all": find_all, "inspect": inspect, "survey": survey, "measure": measure})
