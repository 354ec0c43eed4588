"""Code that a model wrote, from where environments run: a grading worker's turn, and a harness's process."""

from __future__ import annotations

import contextlib

import pytest

from megatron_rl.environments.results import judge
from megatron_rl.environments.sandbox import execution, sandbox_problem
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.types import HarnessRun, Task, Turn
from tests.unit.environments.code_runners import PYTHON, Solver

pytestmark = pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
HERE = "tests.unit.environments.code_runners"


def turn_with(code: str) -> Turn:
    text = Solver().call("python", code=code)
    return Turn(text, "stop", len(text), 0)


def test_a_tool_call_in_a_worker():
    [task] = Solver().tasks("train")
    items = [(task, None, turn_with(code)) for code in ("print(2**100)", "import os; print(os.listdir('.'))", "1/0")]
    with contextlib.closing(WorkerPool(workers=1)) as pool:
        results = pool.grade(f"{HERE}:Solver", {}, items, 60.0, 0.0)
    read = [result.continuation.messages[0]["content"] for result in results]
    assert read[:2] == [str(2**100), "['main.py']"]
    assert read[2].endswith("ZeroDivisionError: division by zero")
    assert all(result.continuation.state == {"tool_calls": 1, "bad_tool_calls": 0} for result in results)


def test_the_tools_schema_is_that_of_the_method():
    [schema] = Solver.tools
    assert schema["function"]["name"] == PYTHON["function"]["name"] == "python"
    assert set(schema["function"]["parameters"]["properties"]) == set(PYTHON["function"]["parameters"]["properties"])


def test_a_machine_that_has_lost_its_sandbox_masks_the_sample(monkeypatch):
    """And does not tell the model of it, which could not help."""
    monkeypatch.setattr(execution, "LAUNCHER", "/nonexistent")
    [task] = Solver().tasks("train")
    result = judge(Solver(), (task, None, turn_with("print(1)")))
    assert result.code == "environment_exception" and "SandboxUnavailable" in result.message


def test_from_a_harness():
    codes = ["print(open('a.txt').read())", "import os; print(int(os.path.exists(OUTSIDE)))"]
    runs = [HarnessRun(Task("0", "?", {"code": code}), 0, "http://127.0.0.1:9/v1", "key") for code in codes]
    with contextlib.closing(WorkerPool.for_harnesses(2, [(f"{HERE}:Runner", {})])) as pool:
        results = pool.run(f"{HERE}:Runner", {}, runs, 60.0, lambda: False)
    assert [result.reward for result in results] == [7.0, 0.0], results
