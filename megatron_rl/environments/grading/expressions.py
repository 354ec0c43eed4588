"""Arithmetic: ``+ - * /`` and brackets, read by Python's parser, never run by it, computed with exact fractions."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

MAX_EXPRESSION = 500
"""Characters; longer ones are malformed."""

_SPELLINGS = (
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])|[\u00d7\u00b7\u22c5\u2217]"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])|[\u00f7\u2215]"), "/"),
    (re.compile(r"\\(?:left|right|,|;|!| )"), ""),
    (re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}"), r"((\1)/(\2))"),
    (re.compile(r"^[\s$`*]+(?=[\d(-])|[\s$`.*]+$|\\[()\[\]]"), ""),
)
_TOKEN = r"\d{1,12}(?![\d.])|[-+*/()]"
_TOKENS = re.compile(rf"(?:\s*(?:{_TOKEN}))+\s*")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class MalformedExpression(ValueError):
    """Not an arithmetic expression."""


def arithmetic_value(text: str) -> Fraction:
    """Return the exact value of an expression, whichever way its signs are written.

    Raises:
        MalformedExpression: it is no arithmetic, or too long.
        ZeroDivisionError: it divides by 0.
    """
    (value, _), *others = equation_sides(text)
    if others:
        raise MalformedExpression("an equation, not an expression")
    return value


def equation_sides(text: str) -> list[tuple[Fraction, list[int]]]:
    """Return the exact value of each side of ``12 / 3 = 4``, or of an expression alone, and the numbers in it.

    Raises:
        MalformedExpression: a side is no arithmetic, or the text too long.
        ZeroDivisionError: one divides by 0.
    """
    if len(text) > MAX_EXPRESSION:
        raise MalformedExpression("too long")
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    trees = [_parsed(side) for side in text.split("=")]
    return [(_value(tree), [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]) for tree in trees]


def _parsed(expression: str) -> ast.expr:
    if not _TOKENS.fullmatch(expression):
        raise MalformedExpression(f"{expression!r:.40} is no arithmetic")
    # to Python ** and // are operators and 007 is no number
    tokens = [str(int(token)) if token.isdigit() else token for token in re.findall(_TOKEN, expression)]
    try:
        return ast.parse(" ".join(tokens), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise MalformedExpression(f"{expression!r:.40} is no arithmetic") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(number):
            return Fraction(number)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, sign, right):
            return _OPERATIONS[type(sign)](_value(left), _value(right))
    raise MalformedExpression("a call, an empty bracket or a sign without a number before it")
