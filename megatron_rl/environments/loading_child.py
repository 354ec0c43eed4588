"""The process in which author's modules are loaded: it says what comes next, does it, and answers with JSON."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.environments.base import Environment, HarnessEnvironment
from megatron_rl.environments.checks import TaskSurvey, survey_tasks
from megatron_rl.environments.child import die_with_parent, parent_channel
from megatron_rl.environments.config import EnvironmentSpec, LineLoader, load_environment_specs
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.loader import discover, find_environment, reason_of
from megatron_rl.environments.loading import Surveyed
from megatron_rl.environments.selftest import run_checks
from megatron_rl.environments.wire import receive, send
from megatron_rl.errors import ConfigError, one_line, problem_lines, shorten

MAX_DETAIL = 2_000

Report = Callable[[str, str, str], None]
"""Told the key of what comes next, who it is and what it does: ``loading`` names it should it not come back."""


def find_all(report: Report, skip: Collection[str]) -> dict[str, Any]:
    """Names and descriptions of all environments, and why some cannot be imported."""

    def begin(module: str) -> None:
        report(module, f"environment {module!r}", "it was imported")

    environments, errors = discover(begin, skip)
    names = {name: one_line(str(environment.description())) for name, environment in environments.items()}
    broken = {name: [reason_of(error), "".join(traceback.format_exception(error))] for name, error in errors.items()}
    return {"environments": names, "broken": broken}


def inspect(report: Report, name: str, options: Sequence[str], limit: int) -> dict[str, Any]:
    """The self-test of one environment."""

    def begin(doing: str) -> None:
        report(name, f"environment {name!r}", doing)

    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what a data set was left without
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every call of a harness
    found = find_environment(name, begin)
    begin("it was set up")
    environment = found.from_options(_values(options))
    checks = run_checks(environment, limit, begin)
    rows = [[check.name, check.passed, one_line(check.detail, MAX_DETAIL)] for check in checks]
    return {"title": one_line(f"{environment.name}: {environment.description()}"), "checks": rows}


def survey(
    report: Report, path: str, skip: Collection[str] = (), demonstrations: bool = False
) -> list[dict[str, Any]]:
    """What the checks of a run ask about each environment of a list; ``demonstrations`` includes theirs."""

    def begin(where: str, name: str, doing: str) -> None:
        report(where, f"{where}: environment {shorten(name)}", doing)

    found, problems = [], []
    report("", str(path), "it was read")
    for spec in load_environment_specs(path, skip, begin):
        begin_part = partial(begin, spec.where, spec.name)
        try:
            begin_part("it was set up")
            environment = spec.create()
            tasks = survey_tasks(environment, begin_part)
            found.append((spec, environment, tasks))
            faults = tasks.problems
        except ConfigError as error:
            faults = error.lines
        problems += [f"{spec.name}: {fault}" for fault in faults]
    if problems:
        raise ConfigError(problem_lines(problems))
    return [asdict(_surveyed(report, *each, demonstrations)) for each in found]


def _surveyed(
    report: Report, spec: EnvironmentSpec, environment: Environment, tasks: TaskSurvey, demonstrations: bool
) -> Surveyed:
    demonstrates, overlong = False, None
    if demonstrations and not environment.evaluation_only:
        report("", f"environment {spec.name!r}", "its demonstrations were read")
        try:
            demonstrates = any(True for _ in environment.demonstrations("train"))
        except Exception as error:
            said = one_line(f"{type(error).__name__}: {error}")
            raise ConfigError([f"{spec.name}: demonstrations raises {said}"]) from error
    if isinstance(environment, DatasetEnvironment):
        overlong = (environment.overlong.buffer, environment.overlong.max_tokens, environment.overlong.free_tokens)
    is_harness = isinstance(environment, HarnessEnvironment)
    return Surveyed(
        spec.name,
        environment.evaluation_only,
        float(environment.reward_range[0]),
        tasks.counts["test"],
        tasks.first_chat,
        demonstrates,
        overlong,
        environment.max_turns,
        is_harness,
        chat=spec.chat_of(environment),
    )


def _values(pairs: Sequence[str]) -> dict[str, object]:
    """``["max_terms=6"]`` as the YAML list would read it."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ConfigError([f"--option {pair} has no value; write KEY=VALUE" for pair in wrong])
    values = {}
    for key, _, text in (pair.partition("=") for pair in pairs):
        try:
            values[key] = yaml.load(text, LineLoader)
        except yaml.YAMLError:
            advice = f"put a text with braces or colons into quotes, as in --option '{key}=\"...\"'"
            raise ConfigError([f"--option {key}={shorten(text)} is no value of YAML; {advice}"]) from None
    return values


def main(works: Mapping[str, Callable[..., Any]]) -> None:
    """Does that of the ``works`` which the first message asks for, and ends whatever still runs by then."""
    channel = parent_channel()
    request = receive(channel)
    die_with_parent(request["parent"])
    _bound_memory()

    def report(key: str, who: str, doing: str) -> None:
        send(channel, {"stage": [key, who, doing]})

    try:
        answer = {"result": works[request["work"]](report, **request["arguments"])}
    except ConfigError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        answer = {"problems": error.lines}
    except BaseException as error:  # noqa: BLE001 - an author's module may raise anything
        traceback.print_exc()
        answer = {"raised": f"raised {reason_of(error)}"}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by a module
        sys.stdout.flush()
        sys.stderr.flush()
    send(channel, answer)
    os._exit(0)  # threads and exit handlers of the modules have no say


def _bound_memory() -> None:
    """Half of the machine's, and the first to go when the kernel runs short: the caller has work to keep."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or half < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (half, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main({"find_all": find_all, "inspect": inspect, "survey": survey})
