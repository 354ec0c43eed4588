"""What the child does: it says what comes next, does it, and returns JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import yaml

from megatron_rl.environments.base import Environment
from megatron_rl.environments.config import prepare_environments
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.loader import discover, find_environment
from megatron_rl.environments.loading.supervise import Stage
from megatron_rl.environments.selftest import run_checks
from megatron_rl.errors import ConfigError, one_line, shorten

MAX_DETAIL = 2_000

Report = Callable[[Stage], None]


def find_all(report: Report, skip: Collection[str]) -> dict[str, Any]:
    """Names and descriptions of all environments, and why some cannot be imported."""

    def begin(module: str) -> None:
        report(Stage(module, f"environment {module!r}", "it was imported"))

    found = discover(begin, skip)
    names = {name: one_line(str(environment.description())) for name, environment in found.environments.items()}
    broken = [[each.name, each.reason, each.traceback] for each in found.broken]
    return {"environments": names, "broken": broken}


def inspect(report: Report, name: str, options: Sequence[str], limit: int) -> dict[str, Any]:
    """The self-test of one environment."""

    def begin(doing: str) -> None:
        report(Stage(name, f"environment {name!r}", doing))

    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what a data set was left without
    found = find_environment(name, begin)
    begin("it was set up")
    environment = found.from_options(_values(options))
    checks = run_checks(environment, limit, begin)
    rows = [[check.name, check.passed, one_line(check.detail, MAX_DETAIL)] for check in checks]
    return {"title": one_line(f"{environment.name}: {environment.description()}"), "checks": rows}


def survey(report: Report, path: str, skip: Collection[int], demonstrations: bool) -> list[dict[str, Any]]:
    """What the checks of a run ask about each environment of a list; ``demonstrations`` includes theirs."""

    def begin(number: int, where: str, name: str, doing: str) -> None:
        report(Stage(str(number), f"{where}: environment {shorten(name)}", doing))

    found = []
    report(Stage("", str(path), "it was read"))
    for name, item in prepare_environments(path, skip, begin).items():
        environment = item.environment
        facts = {
            "name": name,
            "evaluation_only": environment.evaluation_only,
            "test_tasks": item.tasks.counts.get("test", 0),
            "first_chat": item.tasks.first_chat,
            "demonstrates": False,
            "overlong": None,
        }
        if demonstrations and not environment.evaluation_only:
            report(Stage("", f"environment {name!r}", "its demonstrations were read"))
            facts["demonstrates"] = _demonstrates(name, environment)
        if isinstance(environment, DatasetEnvironment):
            overlong = environment.overlong
            facts["overlong"] = [overlong.buffer, overlong.max_tokens, overlong.free_tokens]
        found.append(facts)
    return found


def _demonstrates(name: str, environment: Environment) -> bool:
    try:
        return any(True for _ in environment.demonstrations("train"))
    except Exception as error:
        raise ConfigError([f"{name}: demonstrations raises {one_line(f'{type(error).__name__}: {error}')}"]) from error


def _values(pairs: Sequence[str]) -> dict[str, object]:
    """``["max_terms=6"]`` as the YAML list would read it."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ConfigError([f"--option {pair} has no value; write KEY=VALUE" for pair in wrong])
    split = (pair.partition("=") for pair in pairs)
    return {key: yaml.safe_load(value) for key, _, value in split}


WORK: dict[str, Callable[..., Any]] = {"find_all": find_all, "inspect": inspect, "survey": survey}
