"""AIME 2024 and 2025: thirty problems each, to measure models by."""

from __future__ import annotations

import re

from megatron_rl.environments.data import (
    DatasetEnvironment,
    Problem,
    Row,
    RowError,
    Source,
    chosen,
    dapo_prompt,
    dapo_statement,
)
from megatron_rl.types import Task

COLUMNS = {"columns": ("prompt", "reward_model"), "other_columns": ("problem", "answer")}
SOURCES = {
    2024: Source("BytedTsinghua-SIA/AIME-2024", "train", **COLUMNS),
    2025: Source("math-ai/aime25", "test", **COLUMNS),
}
ANSWER = re.compile(r"0*([0-9]{1,3})(\^\\circ|\^\{\\circ\}|°)?")
"""Some sources pad to three digits and one writes a degree sign: 033, 336^\\circ."""


class AIME(DatasetEnvironment):
    """The American Invitational Mathematics Examination, for evaluation only.

    ``year`` is 2024 or 2025. The reward is 1 or 0, so that its mean is pass@1. ``grader: math`` compares
    values, ``grader: dapo`` is verl's scorer.
    """

    name = "aime"
    evaluation_only = True

    def __init__(self, *, year: int = 2024, grader: str = "math", **options: object) -> None:
        super().__init__(**options)
        chosen("year", year, tuple(SOURCES))
        chosen("grader", grader, ("math", "dapo"))
        self.source, self.grader = SOURCES[year], grader

    def parse(self, row: Row) -> Problem:
        """A row in DAPO's layout, or one of problem and answer, which gets DAPO's prompt."""
        if "prompt" in row:
            prompt, answer = row.messages("prompt"), row.text("reward_model.ground_truth")
        else:
            prompt, answer = dapo_prompt(row.text("problem").strip()), row.text("answer")
        number = ANSWER.fullmatch(answer.strip())
        if number is None:
            raise RowError(f"has the answer {answer!r:.40}; answers of AIME are integers from 0 to 999")
        return Problem(dapo_statement(prompt), prompt, number[1])

    def gold_answer(self, task: Task) -> str:
        """The line that both graders look for."""
        return f"Answer: {task.data['gold']}"
