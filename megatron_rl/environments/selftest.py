"""Whether an environment can be trained on: the checks of ``python -m megatron_rl.environments test``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_rl.environments.base import Environment
from megatron_rl.environments.checks import task_problems
from megatron_rl.environments.grading import grade_one
from megatron_rl.types import Split, Task, Transcript

TIMED_SECONDS = 2.0
SLOWEST = 10
"""Grades a second. A step of 64 groups of 16 would otherwise wait for two minutes."""


@dataclass(frozen=True)
class Check:
    """One row of the report; ``passed`` is None for a check the environment gives no material for."""

    name: str
    passed: bool | None
    detail: str


def run_checks(environment: Environment, limit: int = 100) -> list[Check]:
    """All checks, the graded ones on the first ``limit`` tasks of each split."""
    problems = task_problems(environment)
    if problems:
        return [Check("tasks", False, "; ".join(problems))]
    splits: tuple[Split, ...] = ("test",) if environment.evaluation_only else ("train", "test")
    tasks = [task for split in splits for task in islice(environment.tasks(split), limit)]
    gold = [(task, answer) for task in tasks if (answer := environment.gold_answer(task)) is not None]
    shown = [
        (row.task, row.completion)
        for split in splits
        for row in islice(environment.demonstrations(split), limit)
    ]
    lowest, highest = environment.reward_range
    return [
        Check("tasks", True, f"the first {len(tasks)} of {', '.join(splits)}"),
        _rewards("gold answers", environment, gold, highest),
        _rewards("demonstrations", environment, shown, highest),
        _rewards("empty answers", environment, [(task, "") for task in tasks], lowest),
        _agreement(environment, [*gold, *shown, *((task, "") for task in tasks)]),
        _speed(environment, [*gold, *shown] or [(task, "") for task in tasks]),
    ]


def _rewards(
    name: str, environment: Environment, answers: Sequence[tuple[Task, str]], wanted: float
) -> Check:
    """Every answer must get exactly the reward ``wanted``."""
    if not answers:
        return Check(name, None, "the environment has none")
    for task, text in answers:
        result = grade_one(environment, task, _transcript(text))
        if result.reward != wanted:
            got = result.reward if result.status == "ok" else f"{result.code}: {result.message}"
            return Check(name, False, f"{text!r} to task {task.id!r} gets {got}, not {wanted:g}")
    return Check(name, True, f"{len(answers)} at {wanted:g}")


def _agreement(environment: Environment, answers: Sequence[tuple[Task, str]]) -> Check:
    for task, text in answers:
        first, second = (grade_one(environment, task, _transcript(text)) for _ in range(2))
        if first != second:
            return Check("graded twice", False, f"{text!r} to task {task.id!r} gets {first}, then {second}")
    return Check("graded twice", True, f"{len(answers)} agree")


def _speed(environment: Environment, answers: Sequence[tuple[Task, str]]) -> Check:
    """Grades a second in one thread; run last, when what the grader imports is loaded."""
    start, count = time.perf_counter(), 0
    for task, text in answers:
        grade_one(environment, task, _transcript(text))
        count += 1
        if time.perf_counter() - start > TIMED_SECONDS:
            break
    rate = count / max(time.perf_counter() - start, 1e-9)
    # three digits: a microsecond grader measured over 100 answers gives no more
    shown = f"{float(f'{rate:.3g}'):,.0f} grades a second in one thread"
    if rate < SLOWEST:
        return Check("speed", False, f"{shown}; fewer than {SLOWEST} hold up every step")
    return Check("speed", True, shown)


def _transcript(text: str) -> Transcript:
    return Transcript(text, "stop", len(text))
