"""Countdown: reach the target with the given numbers, each used exactly once, by ``+ - * /`` and brackets.

The expression is parsed here, never evaluated by Python, and computed with exact fractions. The gold answer is
JSON text: ``{"numbers": [30, 100, 93], "target": 23}``.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

from megatron_rl.environments.grading.expressions import MAX_EXPRESSION, MalformedExpression, equation_sides
from megatron_rl.environments.grading.text import final_part, last_boxes, marked_line
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)


def judge(completion: str, gold: str) -> Grade:
    """Return the verdict on a completion; ``ValueError`` when ``gold`` is not the JSON text described above."""
    numbers, target = _puzzle(gold)
    written = _expression(final_part(completion))
    if not written:
        return Grade(REWARDS[0], status="no_answer")
    extracted = written[:MAX_EXPRESSION]
    try:
        sides = equation_sides(written)
    except MalformedExpression:
        return Grade(REWARDS[0], status="unparsable", extracted=extracted)
    except ZeroDivisionError:
        return Grade(REWARDS[0], status="wrong", extracted=extracted)
    right = all(value == target for value, _ in sides) and sorted(sides[0][1]) == sorted(numbers)
    return Grade(REWARDS[right], status="correct" if right else "wrong", extracted=extracted)


def _puzzle(gold: str) -> tuple[list[int], Fraction]:
    try:
        puzzle: dict[str, Any] = json.loads(gold)
        numbers = puzzle["numbers"] if "numbers" in puzzle else puzzle["nums"]
        return [int(number) for number in numbers], Fraction(str(puzzle["target"]))
    except (ValueError, TypeError, KeyError) as error:
        wanted = '{"numbers": [1, 2], "target": 3}'
        raise ValueError(f"the gold answer {gold[:100]!r} is not JSON such as {wanted}: {error!r}") from error


def _expression(text: str) -> str:
    """What is marked as the answer, else the last line that computes something."""
    boxes = last_boxes(text)
    if boxes:
        return boxes[-1]
    line = marked_line(text)
    if line is not None:
        return line
    lines = [line for line in text.splitlines() if re.search(r"\d", line)]
    return lines[-1].strip() if lines else ""
