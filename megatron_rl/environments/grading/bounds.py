"""What an answer may cost: processor time, and the size of its numbers, which is looked at before anything is computed.

Most of the cost cannot be known beforehand, so it is measured: ``processor_time`` stops a grade. But one operation on
two numbers of a million digits runs to its end whatever a signal says, so a number must not become so large.
math-verify parses without evaluating: ``(10^{6})!`` is three nodes, of which the digits would be computed later.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

GRADE_SECONDS = 1.4
"""Of a processor, for a grade; the slowest of 741 published cases and solutions takes 0.4, or 0.8 on a busy machine.
One operation on large numbers runs on for up to half a second."""
MAX_DEPTH = 16
"""Nested brackets: the parser recurses."""
MAX_BITS = 40_000
"""Of a number that would be worked out, bounded from above; 2^2025, 10^9999 and 3000! fit."""
MAX_FACTORIAL = 3_000

_OPENING, _CLOSING = "([{", ")]}"
FORMULA = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\begin\{.*?\\end\{", re.DOTALL)


class OutOfTime(BaseException):
    """The time of a grade is over; no ``Exception``, which sympy and math-verify catch and go on."""


class TooLarge(ValueError):
    """A number beyond the bounds."""


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raises ``OutOfTime`` in the block after that; in the main thread only, since signals reach no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    try:
        # and again every tenth of a second: mpmath has bare excepts, which would swallow a single one
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def too_deep(answer: str) -> bool:
    """Return whether brackets nest deeper than any answer needs."""
    depth = 0
    for sign in answer:
        depth = max(depth + (sign in _OPENING) - (sign in _CLOSING), 0)
        if depth > MAX_DEPTH:
            return True
    return False


def too_large(expression: Any) -> bool:
    """Return whether a number of a parsed expression is beyond the bounds; False for what is only text."""
    try:
        bits(expression)
    except (TooLarge, RecursionError, OverflowError):
        return True
    return False


def bits(expression: Any) -> float:
    """Return a bound from above of the binary digits of the numbers in it, where a symbol counts as 2.

    Raises:
        TooLarge: there may be more than ``MAX_BITS``.
    """
    from sympy import Basic, MatrixBase, Number

    if isinstance(expression, MatrixBase):
        return max(map(bits, expression.flat()), default=1.0)
    if isinstance(expression, Number):
        found = _bits_of_number(expression)
    else:
        found = _bits_of_compound(expression) if isinstance(expression, Basic) else 1.0
    if found > MAX_BITS:
        raise TooLarge
    return found


def _bits_of_compound(expression: Any) -> float:
    import sympy

    arguments = getattr(expression, "_unsorted_args", expression.args)
    parts = list(map(bits, arguments)) or [1.0]
    if isinstance(expression, (sympy.Add, sympy.MatAdd)):
        return max(parts) + math.log2(len(parts))
    if isinstance(expression, (sympy.Mul, sympy.MatMul)):
        return sum(parts)
    if isinstance(expression, sympy.Pow):
        exponent = arguments[1]
        exact = isinstance(exponent, (sympy.Rational, sympy.Float))
        return parts[0] * max(abs(float(exponent)) if exact else 2.0 ** min(parts[1], 64), 1.0)
    if isinstance(expression, (sympy.factorial, sympy.binomial, sympy.gamma, sympy.factorial2, sympy.subfactorial)):
        exact = [abs(int(argument)) for argument in arguments if isinstance(argument, sympy.Integer)]
        largest = max(exact) if len(exact) == len(parts) else 2.0 ** min(*parts, 64)
        if largest > MAX_FACTORIAL:
            raise TooLarge
        return largest * math.log2(largest + 2)
    return max(parts) + isinstance(expression, sympy.Function)


def _bits_of_number(number: Any) -> float:
    from sympy import Float, Rational

    if isinstance(number, Rational):
        return float(max(abs(number.p).bit_length(), abs(number.q).bit_length(), 1))
    if isinstance(number, Float):
        sign_mantissa_exponent_bits = number._mpf_
        return float(abs(sign_mantissa_exponent_bits[2]) + sign_mantissa_exponent_bits[3] + 1)
    return 1.0  # infinity, not a number
