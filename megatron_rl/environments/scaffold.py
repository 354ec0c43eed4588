"""Writes a new environment with its test: ``python -m megatron_rl.environments new NAME``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from pathlib import Path

from megatron_rl.environments.loader import canonical
from megatron_rl.errors import ConfigError

ENVIRONMENT = '''\
"""Rename me: what is asked, and what counts as right."""

from megatron_rl.environments.base import Environment
from megatron_rl.types import Task


class {class_name}(Environment):
    """Says whether a number is even."""

    name = "{name}"

    def __init__(self, *, size: int = 256) -> None:
        self._size = size  # an option: `args: {{size: 1000}}` in the YAML list

    def tasks(self, split):
        for number in range(self._size):
            if (number % 8 == 0) == (split == "test"):  # one in eight is held out
                gold = "no" if number % 2 else "yes"
                yield Task(id=str(number), prompt=f"Is {{number}} even? ", data={{"gold": gold}})

    def grade(self, task, transcript):
        return float(transcript.ended and transcript.text.strip() == task.data["gold"])

    def gold_answer(self, task):
        return task.data["gold"]
'''

TEST = '''\
"""Run with: pytest {path}"""

from megatron_rl.environments.selftest import run_checks
from megatron_rl.types import Transcript

from . import {class_name}


def test_gold_answers_score_the_maximum_and_empty_ones_the_minimum():
    assert [check for check in run_checks({class_name}()) if check.passed is False] == []


def test_a_wrong_answer_and_a_cut_one_score_nothing():
    environment = {class_name}()
    task = next(iter(environment.tasks("train")))
    assert environment.grade(task, Transcript("perhaps", "stop", 1)) == 0.0
    assert environment.grade(task, Transcript(environment.gold_answer(task), "length", 1)) == 0.0
'''


def write_environment(name: str, folder: Path, taken: Collection[str]) -> tuple[Path, Path]:
    """Writes ``folder/name`` and returns its module and its test.

    ``ConfigError`` for a name that is no good, or would select one of those ``taken``.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        why = "it becomes a module and a metric name"
        advice = "use lower-case letters, digits and _, beginning with a letter"
        raise ConfigError([f"{name!r} cannot name an environment, because {why}; {advice}"])
    for other in taken:
        if canonical(other) == canonical(name):
            raise ConfigError([f"an environment {other!r} exists, and {name!r} would select it; choose another name"])
    target = folder / name
    if target.exists() or target.with_suffix(".py").exists():
        raise ConfigError([f"{target} exists already; choose another name, or remove it"])
    module, test = target / "__init__.py", target / f"test_{name}.py"
    try:
        target.mkdir(parents=True)
        module.write_text(ENVIRONMENT.format(name=name, class_name=class_name(name)), encoding="utf-8")
        test.write_text(TEST.format(path=test, class_name=class_name(name)), encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"cannot write {target}: {error.strerror}; choose another --dir"]) from error
    return module, test


def class_name(name: str) -> str:
    """``WordCount`` for ``word_count``."""
    return "".join(part.capitalize() for part in name.split("_"))
