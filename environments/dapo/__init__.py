"""DAPO-Math-17k: competition problems whose answers are integers."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.environments.data import DatasetEnvironment, Problem, Source, chosen, letters_and_digits, read_rows
from megatron_rl.environments.data.layouts import MATH, SLIME, VERL, Layout

EXCLUDABLE = (Layout("problem"), *MATH)
"""Layouts of a file whose problems are dropped."""
LONGEST_ANSWER = 15
"""A float64 holds integers of so many digits. Labels with more went through one before they were published:
105263157894736842 became 105263157894736848, and no right answer can match it."""


class DAPO(DatasetEnvironment):
    """Competition math with integer answers, DAPO-Math-17k, in its published prompt.

    The reward is 1 or -1, as in verl. ``grader: dapo`` is verl's scorer (the last ``Answer:`` line of the last
    300 characters, compared as text), ``grader: math`` compares values, ``grader: deepscaler`` those in a box after
    the thought. ``held_out`` keeps one problem in so many for the test split, 0 none. ``exclude_path`` is a file such
    as MATH-500's: problems that occur in it are dropped, so that they can be evaluated on.
    """

    name = "dapo"
    reward_range = (-1.0, 1.0)
    source = Source("BytedTsinghua-SIA/DAPO-Math-17k", "train", (VERL, SLIME))

    def __init__(self, *, grader: str = "dapo", held_out: int = 256, exclude_path: str = "", **options: object) -> None:
        super().__init__(**options)
        chosen("grader", grader, ("dapo", "math", "deepscaler"))
        if held_out < 0 or held_out == 1:
            raise ValueError(f"held_out is {held_out}; use 0, or at least 2 to leave problems to train on")
        self.grader, self.held_out = grader, held_out
        self._exclude_path = exclude_path
        self._excluded: frozenset[str] | None = None

    def reject(self, problem: Problem) -> str:
        """Damaged answers, and problems that are evaluated on."""
        if sum(map(str.isdigit, problem.gold)) > LONGEST_ANSWER:
            return f"with an answer over {LONGEST_ANSWER} digits, damaged by a float"
        if self._exclude_path and letters_and_digits(problem.statement) in self._read_excluded():
            return "that exclude_path holds"
        return ""

    def _read_excluded(self) -> frozenset[str]:
        if self._excluded is None:
            source = replace(self.source, layouts=EXCLUDABLE, path=self._exclude_path, option="exclude_path")
            self._excluded = frozenset(read_rows(source, lambda row: letters_and_digits(row.problem()[0])))
        return self._excluded
