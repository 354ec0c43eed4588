"""Rows of tasks that are without an end, too large or too deep."""

from __future__ import annotations

import itertools

import pytest

from megatron_rl.environments.base import Environment
from megatron_rl.environments.checks import MAX_PROBLEMS, read_rows, survey_tasks
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Task


class Rows(Environment):
    """Gives the rows it is told to."""

    name = "rows"

    def __init__(self, rows) -> None:
        self._rows = rows

    def tasks(self, split):
        return self._rows()

    def grade(self, task, transcript):
        return 0.0


def endless_tasks():
    return (Task(str(number), "2+2=") for number in itertools.count())


def test_tasks_without_an_end_are_refused(monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.checks.MAX_ROWS", 50)
    assert survey_tasks(Rows(endless_tasks)).problems == [
        "train has more than 50 rows, or no end; give fewer",
    ]
    found = survey_tasks(Rows(lambda: itertools.repeat("no task"))).problems
    assert len(found) == MAX_PROBLEMS + 1
    assert found[MAX_PROBLEMS] == f"... and {50 + 1 - MAX_PROBLEMS} more"


def test_tasks_larger_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.checks.MAX_BYTES", 10_000)
    [problem] = survey_tasks(Rows(lambda: [Task(str(n), "x" * 999) for n in range(100)])).problems[:1]
    assert problem == "train has more than 9.31323e-06 GiB in its first 10 rows; give less"


def test_a_row_of_shared_lists_is_not_written_out():
    value = ["x"] * 10
    for _ in range(30):
        value = [value] * 10
    [problem] = survey_tasks(Rows(lambda: [Task("a", "2+2=", {"v": value})])).problems[:1]
    assert problem == "train row 0 cannot be sent: more than 1,000,000 values"


def test_the_server_stops_reading_at_its_deadline_and_bounds(monkeypatch):
    with pytest.raises(EnvironmentFault, match="^train has given 1 rows in 0 s and goes on"):
        read_rows(Rows(endless_tasks), "tasks", "train", seconds=0.0)
    monkeypatch.setattr("megatron_rl.environments.checks.MAX_ROWS", 50)
    with pytest.raises(EnvironmentFault, match="^train has more than 50 rows, or no end"):
        read_rows(Rows(endless_tasks), "tasks", "train", seconds=60.0)
