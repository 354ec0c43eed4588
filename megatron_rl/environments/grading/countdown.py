"""Countdown: reach the target with the given numbers, each used exactly once, by ``+ - * /`` and brackets.

The expression is parsed here, never evaluated by Python, and computed with exact fractions. The gold answer is
JSON text: ``{"numbers": [30, 100, 93], "target": 23}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from megatron_rl.environments.grading.text import final_part, last_boxes, marked_line
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)
MAX_EXPRESSION = 500
MAX_DEPTH = 32

_SPELLINGS = (
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])|[\u00d7\u00b7\u22c5\u2217]"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])|[\u00f7\u2215]"), "/"),
    (re.compile(r"\\(?:left|right|,|;|!| )"), ""),
    (re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}"), r"((\1)/(\2))"),
    (re.compile(r"^[\s$`*]+(?=[\d(-])|[\s$`.*]+$|\\[()\[\]]"), ""),
)
_TOKEN = re.compile(r"\s*(\d{1,12}(?![\d.])|[-+*/()])")


class _Malformed(ValueError):
    """Not an arithmetic expression."""


def judge(completion: str, gold: str) -> Grade:
    """The verdict on a completion; ``ValueError`` when ``gold`` is not the JSON text described above."""
    numbers, target = _puzzle(gold)
    written = _expression(final_part(completion))
    if not written:
        return Grade(REWARDS[0], status="no_answer")
    extracted = written[:MAX_EXPRESSION]
    try:
        expression, *results = _plain(written).split("=")
        used: list[int] = []
        value = _value(expression, used)
        claimed = [_value(result, []) for result in results]
    except (_Malformed, ZeroDivisionError) as problem:
        wrong = isinstance(problem, ZeroDivisionError)
        return Grade(REWARDS[0], status="wrong" if wrong else "unparsable", extracted=extracted)
    right = value == target and sorted(used) == sorted(numbers) and all(claim == target for claim in claimed)
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


def _plain(expression: str) -> str:
    """The expression in digits and ``+-*/()=``, whichever way the signs were written."""
    if len(expression) > MAX_EXPRESSION:
        raise _Malformed("too long")
    for pattern, replacement in _SPELLINGS:
        expression = pattern.sub(replacement, expression)
    return expression


def _value(expression: str, used: list[int]) -> Fraction:
    """The exact value; the numbers that stand in it are appended to ``used``."""
    tokens = [*_tokens(expression), ""]
    value, end = _sum(tokens, 0, used, 0)
    if tokens[end]:
        raise _Malformed(f"{tokens[end]!r} is left over")
    return value


def _tokens(expression: str) -> Iterator[str]:
    position, length = 0, len(expression.rstrip())
    while position < length:
        match = _TOKEN.match(expression, position)
        if match is None:
            raise _Malformed(f"{expression[position : position + 20]!r} is no arithmetic")
        yield match[1]
        position = match.end()


def _sum(tokens: list[str], at: int, used: list[int], depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, used, depth)
    while tokens[at] in ("+", "-"):
        sign = tokens[at]
        term, at = _product(tokens, at + 1, used, depth)
        value = value + term if sign == "+" else value - term
    return value, at


def _product(tokens: list[str], at: int, used: list[int], depth: int) -> tuple[Fraction, int]:
    value, at = _factor(tokens, at, used, depth)
    while tokens[at] in ("*", "/"):
        sign = tokens[at]
        factor, at = _factor(tokens, at + 1, used, depth)
        value = value * factor if sign == "*" else value / factor
    return value, at


def _factor(tokens: list[str], at: int, used: list[int], depth: int) -> tuple[Fraction, int]:
    if depth > MAX_DEPTH:
        raise _Malformed("nested too deeply")
    token = tokens[at]
    if token.isdigit():
        used.append(int(token))
        return Fraction(token), at + 1
    if token == "-":
        value, at = _factor(tokens, at + 1, used, depth + 1)
        return -value, at
    if token != "(":
        raise _Malformed(f"{token!r} where a number was due")
    value, at = _sum(tokens, at + 1, used, depth + 1)
    if tokens[at] != ")":
        raise _Malformed("a bracket is not closed")
    return value, at + 1
