"""Sums and differences of small numbers, worked out step by step."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice

from megatron_rl.environments.base import ATTEMPTS, Environment, drawn_tasks, split_of
from megatron_rl.types import Demonstration, Grade, Split, Task, Transcript


class Arithmetic(Environment):
    """Adds and subtracts small numbers in a row: ``3+2-3=`` wants ``3+2=5,5-3=2#2``.

    The reward is 1 when the text ends by itself and what follows the last ``#`` is the answer, else 0; the
    chain before it is free. Every running total stays within 0 and ``max_total``.

    The demonstrations start with flawless chains, some of them two-term drills that cover every single step.
    From ``shortcut_start`` on they turn bad on purpose, to leave reinforcement learning something to correct:
    most skip the chain, and steps slip by up to 3. They never show a test prompt.
    """

    name = "arithmetic"
    in_process = True

    def __init__(
        self,
        *,
        min_terms: int = 3,
        max_terms: int = 5,
        max_operand: int = 9,
        max_total: int = 19,
        seed: int = 0,
        train_tasks: int = 8192,
        test_tasks: int = 512,
        demonstrations: int = 48000,
        drill_share: float = 0.3,
        shortcut_start: float = 0.8,
        shortcut_share: float = 0.6,
        slip_rate: float = 0.1,
    ) -> None:
        if not 2 <= min_terms <= max_terms <= 100:
            raise ValueError(f"2 <= min_terms <= max_terms <= 100 must hold, got {min_terms} and {max_terms}")
        if min(max_operand, max_total) < 1 or min(train_tasks, test_tasks, demonstrations) < 0:
            raise ValueError("max_operand and max_total must be at least 1, and counts not negative")
        if not all(0 <= share <= 1 for share in (drill_share, shortcut_start, shortcut_share, slip_rate)):
            raise ValueError("drill_share, shortcut_start, shortcut_share and slip_rate are shares, 0 to 1")
        self._terms, self._max_total = (min_terms, max_terms), max_total
        self._max_operand = min(max_operand, max_total)  # one beyond fits no running total
        self._seed = seed
        self._num_tasks = {"train": train_tasks, "test": test_tasks}
        self._num_demonstrations, self._first_shortcut = demonstrations, shortcut_start * demonstrations
        self._drill_share, self._shortcut_share, self._slip_rate = drill_share, shortcut_share, slip_rate

    def tasks(self, split: Split) -> Iterator[Task]:
        """Distinct prompts in random order; fewer than asked for where no more exist."""
        rng = random.Random(f"{self._seed}:{split}")
        seen: set[str] = set()
        for task in drawn_tasks(lambda: _task(self._draw(rng)), split, self._num_tasks[split]):
            seen.add(task.id)
            yield task
        missing = self._num_tasks[split] - len(seen)
        rest = (task for task in map(_task, self._all_chains()) if task.id not in seen and split_of(task.id) == split)
        yield from islice(rest, missing)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """1 for the exact answer after the last ``#`` of a text that ended, else 0."""
        _, mark, answer = transcript.text.rpartition("#")
        right = transcript.ended and mark and answer == str(task.data["answer"])
        return Grade(float(bool(right)), {"chain": float("=" in transcript.text)})

    def gold_answer(self, task: Task) -> str:
        """The flawless chain."""
        return self._solve(re.findall(r"[+-]?\d+", task.prompt))

    def demonstrations(self, split: Split) -> Iterable[Demonstration]:
        """The curriculum, of training prompts only."""
        return map(self.demonstration, range(self._num_demonstrations if split == "train" else 0))

    def demonstration(self, index: int) -> Demonstration:
        """Element ``index`` of the stream; it depends on the seed and the index alone."""
        rng = random.Random(f"{self._seed}:demonstration:{index}")
        drill = rng.random() < self._drill_share
        terms = self._draw_for_training(rng, drill)
        bad = index >= self._first_shortcut
        if bad and rng.random() < self._shortcut_share:
            return Demonstration(_task(terms), f"#{_total(terms)}")
        return Demonstration(_task(terms), self._solve(terms, rng if bad and not drill else None))

    def _draw_for_training(self, rng: random.Random, drill: bool) -> list[str]:
        for _ in range(ATTEMPTS):
            terms = self._draw(rng, drill)
            if split_of(_prompt(terms)) == "train":
                return terms
        raise ValueError("no training prompt exists; raise max_operand, max_total or max_terms")

    def _draw(self, rng: random.Random, drill: bool = False) -> list[str]:
        """The signed terms of a chain; a drill has two, the first being any running total."""
        count = 2 if drill else rng.randint(*self._terms)
        total = rng.randint(0, self._max_total if drill else self._max_operand)
        terms = [str(total)]
        while len(terms) < count:
            operand = rng.randint(0, self._max_operand)
            signs = self._signs(total, operand)
            if signs:
                terms.append(f"{rng.choice(signs)}{operand}")
                total += int(terms[-1])
        return terms

    def _signs(self, total: int, operand: int) -> str:
        """The signs that keep the running total in its range."""
        plus = "+" if total + operand <= self._max_total else ""
        return f"{plus}-" if total >= operand else plus

    def _all_chains(self) -> Iterator[list[str]]:
        """Every chain there is, short ones first."""
        chains = [[str(first)] for first in range(self._max_operand + 1)]
        for count in range(2, self._terms[1] + 1):
            operands = range(self._max_operand + 1)
            chains = [
                [*chain, f"{sign}{operand}"]
                for chain in chains
                for operand in operands
                for sign in self._signs(_total(chain), operand)
            ]
            if count >= self._terms[0]:
                yield from chains

    def _solve(self, terms: list[str], slips: random.Random | None = None) -> str:
        """The chain of steps and its result; with ``slips``, wrong steps are carried on to the end."""
        value, steps = int(terms[0]), []
        for term in terms[1:]:
            result = max(0, value + int(term))  # only after a slip can it be negative
            if slips and slips.random() < self._slip_rate:
                nearby = [result + by for by in (-3, -2, -1, 1, 2, 3) if 0 <= result + by <= self._max_total]
                result = slips.choice(nearby or [result])
            steps.append(f"{value}{term}={result}")
            value = result
        return f"{','.join(steps)}#{value}"


def _prompt(terms: list[str]) -> str:
    return "".join(terms) + "="


def _total(terms: list[str]) -> int:
    return sum(map(int, terms))


def _task(terms: list[str]) -> Task:
    prompt = _prompt(terms)
    return Task(id=prompt, prompt=prompt, data={"answer": _total(terms)})
