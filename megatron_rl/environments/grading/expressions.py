"""Arithmetic: ``+ - * /`` and brackets, parsed here and never evaluated by Python, computed with exact fractions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

MAX_EXPRESSION = 500
"""Characters; longer ones are malformed."""
MAX_DEPTH = 32

_SPELLINGS = (
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])|[\u00d7\u00b7\u22c5\u2217]"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])|[\u00f7\u2215]"), "/"),
    (re.compile(r"\\(?:left|right|,|;|!| )"), ""),
    (re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}"), r"((\1)/(\2))"),
    (re.compile(r"^[\s$`*]+(?=[\d(-])|[\s$`.*]+$|\\[()\[\]]"), ""),
)
_TOKEN = re.compile(r"\s*(\d{1,12}(?![\d.])|[-+*/()])")


class MalformedExpression(ValueError):
    """Not an arithmetic expression; the message says why."""


def arithmetic_value(text: str) -> Fraction:
    """The exact value of an expression, whichever way its signs are written.

    Raises:
        MalformedExpression: it is no arithmetic, too long or nested too deeply.
        ZeroDivisionError: it divides by 0.
    """
    return value_of(in_plain_signs(text), [])


def in_plain_signs(expression: str) -> str:
    """The expression in digits and ``+-*/()=``, whichever way the signs were written.

    Raises:
        MalformedExpression: it is too long.
    """
    if len(expression) > MAX_EXPRESSION:
        raise MalformedExpression("too long")
    for pattern, replacement in _SPELLINGS:
        expression = pattern.sub(replacement, expression)
    return expression


def value_of(expression: str, used: list[int]) -> Fraction:
    """The exact value; the numbers that stand in it are appended to ``used``.

    Raises:
        MalformedExpression: it is no arithmetic.
        ZeroDivisionError: it divides by 0.
    """
    tokens = [*_tokens(expression), ""]
    value, end = _sum(tokens, 0, used, 0)
    if tokens[end]:
        raise MalformedExpression(f"{tokens[end]!r} is left over")
    return value


def _tokens(expression: str) -> Iterator[str]:
    position, length = 0, len(expression.rstrip())
    while position < length:
        match = _TOKEN.match(expression, position)
        if match is None:
            raise MalformedExpression(f"{expression[position : position + 20]!r} is no arithmetic")
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
        raise MalformedExpression("nested too deeply")
    token = tokens[at]
    if token.isdigit():
        used.append(int(token))
        return Fraction(token), at + 1
    if token == "-":
        value, at = _factor(tokens, at + 1, used, depth + 1)
        return -value, at
    if token != "(":
        raise MalformedExpression(f"{token!r} where a number was due")
    value, at = _sum(tokens, at + 1, used, depth + 1)
    if tokens[at] != ")":
        raise MalformedExpression("a bracket is not closed")
    return value, at + 1
