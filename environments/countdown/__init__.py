"""Countdown: make a target out of given numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from operator import add, mul, sub

from megatron_rl.environments.data import DatasetEnvironment, Problem, Row, RowError, Source, held_out
from megatron_rl.environments.data.layouts import NUMBERS, NUMBERS_TEXT
from megatron_rl.types import Split, Task

LARGEST_SEARCH = 4
"""Numbers of a puzzle that is solved by search when it comes without a solution; five would take seconds."""
ATTEMPTS = 20000
"""Draws in a row without a new puzzle before the options are found too narrow."""
PROMPT = (
    "Using each of the numbers {numbers} exactly once, write an arithmetic expression that equals {target}. "
    "You may use +, -, *, / and parentheses. Reason step by step, and write the expression on the last line "
    'after "Answer:".'
)
Terms = list[tuple[str, Fraction]]
"""Expressions with their values."""


class Countdown(DatasetEnvironment):
    """Arithmetic with given numbers, each used once, that must hit a target.

    Without ``path`` the puzzles are generated: ``train_tasks`` and ``test_tasks`` of them, each of
    ``min_numbers`` to ``max_numbers`` numbers up to ``max_number``, with a target up to ``max_target`` that can
    be reached by construction. ``published: true`` reads Jiayi-Pan/Countdown-Tasks-3to4 from the hub. One
    puzzle in ``held_out`` belongs to the test split. The reward is 1 or 0.
    """

    name = "countdown"
    grader = "countdown"
    source = Source("Jiayi-Pan/Countdown-Tasks-3to4", "train", (NUMBERS, NUMBERS_TEXT))

    def __init__(
        self,
        *,
        published: bool = False,
        held_out: int = 16,
        seed: int = 0,
        train_tasks: int = 4096,
        test_tasks: int = 256,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 99,
        max_target: int = 100,
        **options: object,
    ) -> None:
        super().__init__(**options)
        if not 2 <= min_numbers <= max_numbers <= 8:
            raise ValueError(f"2 <= min_numbers <= max_numbers <= 8 must hold, got {min_numbers} and {max_numbers}")
        if max(train_tasks, test_tasks) > 1_000_000:  # they are all made before the first is looked at
            raise ValueError("train_tasks and test_tasks are at most 1,000,000")
        if min(train_tasks, test_tasks) < 0 or min(max_number, max_target) < 1 or held_out < 2:
            raise ValueError("use held_out of 2 or more, max_number and max_target of 1 or more, no negative counts")
        self._read = published or bool(self._path)
        self.held_out, self._seed = held_out, seed
        self._generated: dict[Split, tuple[Problem, ...]] = {}
        self._num_tasks = {"train": train_tasks, "test": test_tasks}
        self._count, self._max_number, self._max_target = (min_numbers, max_numbers), max_number, max_target

    def problems(self, split: Split) -> Sequence[Problem]:
        """Puzzles out of the data set, or new ones."""
        if self._read:
            return super().problems(split)
        if split not in self._generated:
            self._generated[split] = tuple(self._generate(split))
        return self._generated[split]

    def parse(self, row: Row) -> Problem:
        """Numbers and target; text such as "30,100,93" is read too."""
        numbers, target = row.layout.problem, row.layout.answer
        values = row.value(numbers)
        values = values.strip("[] ").split(",") if isinstance(values, str) else values
        if not isinstance(values, list) or not values:
            raise RowError(f"has {numbers} {values!r:.40}; it must be a list of numbers")
        solution = row.text("solution") if "solution" in row else ""
        return _problem([_integer(value, numbers) for value in values], _integer(row.value(target), target), solution)

    def gold_answer(self, task: Task) -> str | None:
        """The solution that came with the puzzle; small puzzles without one are solved."""
        puzzle = json.loads(task.data["gold"])
        solution = task.data["solution"]
        if not solution and len(puzzle["numbers"]) <= LARGEST_SEARCH:
            solution = _solve([(str(number), Fraction(number)) for number in puzzle["numbers"]], puzzle["target"])
        return f"Answer: {solution}" if solution else None

    def _generate(self, split: Split) -> Iterator[Problem]:
        rng = random.Random(f"{self._seed}:{split}")
        seen: set[str] = set()
        misses = 0
        while len(seen) < self._num_tasks[split]:
            problem = self._draw(rng)
            misses += 1
            fresh = problem is not None and problem.statement not in seen
            if fresh and held_out(problem.statement, self.held_out) == (split == "test"):
                misses = 0
                seen.add(problem.statement)
                yield problem
            if misses > ATTEMPTS:
                raise ValueError(f"found only {len(seen)} {split} puzzles; raise max_number or ask for fewer")

    def _draw(self, rng: random.Random) -> Problem | None:
        """Numbers put together at random; None when the result is no good target."""
        numbers = [rng.randint(1, self._max_number) for _ in range(rng.randint(*self._count))]
        terms: Terms = [(str(number), Fraction(number)) for number in numbers]
        while len(terms) > 1:
            rng.shuffle(terms)
            terms.append(rng.choice(_combined(terms.pop(), terms.pop())))
        expression, value = terms[0]
        good = value.denominator == 1 and 1 <= value <= self._max_target
        return _problem(numbers, int(value), expression) if good else None


def _problem(numbers: list[int], target: int, solution: str) -> Problem:
    statement = f"{' '.join(map(str, sorted(numbers)))} = {target}"
    text = PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
    gold = json.dumps({"numbers": sorted(numbers), "target": target})
    return Problem(statement, ({"role": "user", "content": text},), gold, {"solution": solution})


def _integer(value: object, column: str) -> int:
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise RowError(f"has {value!r:.40} in {column}; it must be an integer")


def _combined(left: tuple[str, Fraction], right: tuple[str, Fraction]) -> Terms:
    """All that two expressions give; the bigger one comes first, so that no value is negative."""
    (small, low), (big, high) = sorted((left, right), key=lambda term: term[1])
    found = [(f"({big} {sign} {small})", compute(high, low)) for sign, compute in (("+", add), ("-", sub), ("*", mul))]
    if low:
        found.append((f"({big} / {small})", high / low))
    return found


def _solve(terms: Terms, target: int) -> str | None:
    """An expression of all terms that equals the target, found by trying everything."""
    if len(terms) == 1:
        return terms[0][0] if terms[0][1] == target else None
    for first, second in combinations(range(len(terms)), 2):
        rest = [term for index, term in enumerate(terms) if index not in (first, second)]
        for joined in _combined(terms[first], terms[second]):
            found = _solve([*rest, joined], target)
            if found:
                return found
    return None
