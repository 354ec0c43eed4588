"""GSM8K: grade-school word problems, with worked solutions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_rl.environments.data import DatasetEnvironment, Problem, Row, RowError, Source
from megatron_rl.environments.data.layouts import QUESTION_SOLVED, VERL, VERL_SOLVED
from megatron_rl.errors import ConfigError
from megatron_rl.types import Demonstration, Prompt, Split, Transcript

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SOLUTION = re.compile(r"(.*?)\n*#### *(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*", re.DOTALL)
MARK = "####"
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


class GSM8K(DatasetEnvironment):
    """Grade-school word problems with a number for an answer.

    ``path`` is a file of training rows and ``test_path`` one of test rows, both as published or as verl
    prepares them; without them the published splits come from the hub. Both ask with verl's prompt. The reward is 1 or
    0. With ``strict`` a number counts only after ####, as in verl and SkyRL; without it also in a box or as the last.
    """

    name = "gsm8k"
    grader = "exact_number"
    source = Source("openai/gsm8k", "train", (QUESTION_SOLVED, VERL_SOLVED, VERL), config="main")

    def __init__(self, *, test_path: str = "", strict: bool = False, **options: object) -> None:
        super().__init__(**options)
        self._test_path, self._strict = test_path, strict

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
        statement, chat = row.problem()
        worked = row.solution()
        found = SOLUTION.fullmatch(worked or f"#### {row.answer()}")
        if found is None:
            given = f"{(worked or row.answer())[-40:]!r}"
            raise RowError(f"has an answer without #### and a number at its end: {given}")
        gold = found[2].replace(",", "")
        solution = f"{CALCULATOR_MARK.sub('', found[1])}\n#### {gold}".lstrip("\n") if worked else ""
        return Problem(statement, chat or self.prompt(statement), gold, solution=solution)

    def prompt(self, statement: str) -> Prompt:
        """Asks for the published form of an answer."""
        return ({"role": "user", "content": f"{statement} {INSTRUCTION}"},)

    def answer_in(self, transcript: Transcript) -> str:
        """With ``strict`` nothing, unless the answer is marked."""
        answer = super().answer_in(transcript)
        return "" if self._strict and MARK not in answer else answer

    def demonstrations(self, split: Split) -> Iterator[Demonstration]:
        """The worked solutions, in the order of the data set."""
        return (Demonstration(one.task, one.solution) for one in self.problems(split) if one.solution)
