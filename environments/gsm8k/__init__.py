"""GSM8K: grade-school word problems, with worked solutions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_rl.environments.data import DatasetEnvironment, Problem, Row, RowError, Source
from megatron_rl.errors import ConfigError
from megatron_rl.types import Demonstration, Split, Task

INSTRUCTION = "Solve the problem step by step. Write the answer on the last line, as #### and the number."
SOLUTION = re.compile(r"(.*?)\n*#### *(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*", re.DOTALL)
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


class GSM8K(DatasetEnvironment):
    """Grade-school word problems with a number for an answer.

    ``path`` is a file of training rows and ``test_path`` one of test rows, both with the columns ``question``
    and ``answer``; without them the published splits come from the hub. The reward is 1 or 0.
    """

    name = "gsm8k"
    grader = "exact_number"
    source = Source("openai/gsm8k", "train", ("question", "answer"), config="main")

    def __init__(self, *, test_path: str = "", **options: object) -> None:
        super().__init__(**options)
        self._test_path = test_path

    def problems(self, split: Split) -> Sequence[Problem]:
        """The published split, or the rows of its file."""
        path, other, option = self._path, self._test_path, "path"
        if split == "test":
            path, other, option = self._test_path, self._path, "test_path"
        if other and not path:
            if self.evaluation_only:
                raise ConfigError(["gsm8k is only evaluated, and path is for training; call it test_path"])
            return ()  # half from a file and half from the hub is nobody's wish
        return self.load(replace(self.source, split=split, path=path, option=option))

    def parse(self, row: Row) -> Problem:
        """The number after #### is the answer; the text before it, without <<48/2=24>>, a demonstration."""
        question, answer = row.text("question").strip(), row.text("answer")
        found = SOLUTION.fullmatch(answer)
        if found is None:
            raise RowError(f"has an answer without #### and a number at its end: {answer[-40:]!r}")
        gold = found[2].replace(",", "")
        solution = f"{CALCULATOR_MARK.sub('', found[1])}\n#### {gold}".lstrip("\n")
        prompt = ({"role": "user", "content": f"{question}\n\n{INSTRUCTION}"},)
        return Problem(question, prompt, gold, solution=solution)

    def demonstrations(self, split: Split) -> Iterator[Demonstration]:
        """The worked solutions, in the order of the data set."""
        return (Demonstration(problem.task, problem.solution) for problem in self.problems(split))

    def gold_answer(self, task: Task) -> str:
        """The last line of a solution."""
        return f"#### {task.data['gold']}"
