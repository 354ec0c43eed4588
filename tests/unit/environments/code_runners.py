"""Environments that run what the model wrote."""

from __future__ import annotations

import os

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.sandbox import Limits, python_tool, run_python
from megatron_rl.environments.tools import ToolEnvironment, tool
from megatron_rl.types import Task

PYTHON, RUN = python_tool(Limits(cpu_s=5, wall_s=60.0))


class Solver(ToolEnvironment):
    """Has a Python."""

    name = "solver"
    needs_sandbox = True

    def tasks(self, split):
        yield Task(split, ({"role": "user", "content": "What is 2**100?"},), {"answer": str(2**100)})

    @tool
    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints."""
        return RUN(code)

    def grade(self, task, transcript):
        return float(transcript.text == task.data["answer"])


class Runner(HarnessEnvironment):
    """Runs the task's code beside a file of its own."""

    name = "runner"
    needs_sandbox = True

    def tasks(self, split):
        yield Task(split, "?", {})

    def run(self, task, client):
        result = run_python(f"OUTSIDE = {os.getcwd()!r}\n{task.data['code']}", files={"a.txt": "7"})
        return float(result.stdout or "nan")
