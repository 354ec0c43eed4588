"""MATH-500: five hundred problems of the MATH test set, to measure models by."""

from __future__ import annotations

from megatron_rl.environments.data import DatasetEnvironment, Problem, Row, Source
from megatron_rl.types import Task

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


class MATH500(DatasetEnvironment):
    """Competition math with answers of every form, MATH-500, for evaluation only.

    The reward is 1 or 0, so that its mean is pass@1.
    """

    name = "math500"
    evaluation_only = True
    grader = "math"
    source = Source("HuggingFaceH4/MATH-500", "test", ("problem", "answer"))

    def parse(self, row: Row) -> Problem:
        """Problem and answer; the other columns are not needed."""
        problem = row.text("problem").strip()
        return Problem(problem, ({"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"},), row.text("answer"))

    def gold_answer(self, task: Task) -> str:
        """The boxed answer."""
        return f"\\boxed{{{task.data['gold']}}}"
