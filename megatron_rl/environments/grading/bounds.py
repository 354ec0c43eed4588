"""What an answer may cost: sizes of its text and of its expression, looked at before anything is computed.

math-verify parses without evaluating, so ``(10^{6})!`` is three nodes at first; comparing it would work out five
million digits. The bounds are far above what published answers need: of the 982 answers and cases measured, none
nests brackets more than 3 deep or has more than 4 trigonometric functions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

MAX_DEPTH = 8
"""Nested brackets: the parser's time grows by half with each."""
MAX_BARS = 12
MAX_RELATIONS = 12
MAX_BITS = 20_000
"""Of a number that would be worked out, bounded from above; 2^2019 and 1000! fit."""
MAX_FACTORIAL = 1_000
MAX_TERMS = 500
"""Of a power or product when it is multiplied out."""
MAX_BITS_BESIDE_FUNCTIONS, MAX_TERMS_BESIDE_FUNCTIONS = 500, 30
"""The same where the gold answer has functions of symbols, because sympy simplifies the difference: against
pi/2 + sin(x) it took 14 s for 2^2019 - 1 and 6 s for (1 + x)^100."""
MOST = {"nodes": 250, "functions": 5, "roots": 8}
"""Of an expression."""
MAX_STEPS = 100
"""Of a finite sum or product."""

_CLOSING = str.maketrans(dict.fromkeys("([{", "(") | dict.fromkeys(")]}", ")"))
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|lt|gt)(?:q|qslant)?(?![a-zA-Z])")
_NESTABLE = re.compile(r"[()|]")
_BINOMIAL = re.compile(r"\\[dt]?binom(?![a-zA-Z])")
_SMALL_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{[a-z\d+\-\s]{1,20}\}\s*\{[a-z\d+\-\s]{1,20}\}")
_DIVISOR = re.compile(r"\\(?:gcd|lcm|operatorname\s*\{(?:gcd|lcm)\})(?![a-zA-Z])")
_LONG_NUMBER = re.compile(r"\d{4}")
_FORMULA = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\begin\{.*?\\end\{", re.DOTALL)


class TooCostly(ValueError):
    """An expression beyond the bounds."""


def text_too_costly(answer: str) -> bool:
    """Whether the text could keep the parser busy."""
    if len(_RELATION.findall(answer)) > MAX_RELATIONS or _evaluated_early(answer):
        return True
    depth = bars = 0
    for sign in _NESTABLE.findall(answer.translate(_CLOSING)):
        if sign == "|":
            bars += 1
        else:
            depth = max(depth + (1 if sign == "(" else -1), 0)
        if depth > MAX_DEPTH or bars > MAX_BARS:
            return True
    return False


def text_of_short_formulas(prose: str, longest: int) -> str:
    """The prose without its formulas of more than ``longest`` characters."""
    return _FORMULA.sub(lambda formula: formula[0] if len(formula[0]) <= longest else " ", prose)


def _evaluated_early(answer: str) -> bool:
    """Binomials and divisors are worked out while they are parsed: with large numbers they are refused as text."""
    small = _SMALL_BINOMIAL.findall(answer)
    if len(small) < len(_BINOMIAL.findall(answer)) or any(map(_LONG_NUMBER.search, small)):
        return True
    return bool(_DIVISOR.search(answer)) and ("^" in answer or "!" in answer)


def too_costly(expression: Any, beside_functions: bool = False) -> bool:
    """Whether comparing a parsed expression could take long; False for what is only text."""
    try:
        Meter(beside_functions).measure(expression)
    except (TooCostly, RecursionError, OverflowError):
        return True
    return False


def has_functions(gold: Any) -> bool:
    """Whether the parsed ``gold`` has functions of symbols."""
    from sympy import Basic, Function

    return isinstance(gold, Basic) and any(function.free_symbols for function in gold.atoms(Function))


class Meter:
    """Adds up what costs; ``measure`` raises ``TooCostly``."""

    def __init__(self, beside_functions: bool = False) -> None:
        self._most_bits = MAX_BITS_BESIDE_FUNCTIONS if beside_functions else MAX_BITS
        self._most_terms = MAX_TERMS_BESIDE_FUNCTIONS if beside_functions else MAX_TERMS
        self._seen: Counter[str] = Counter()

    def measure(self, expression: Any) -> tuple[float, float]:
        """Bounds from above of the binary digits and of the terms when multiplied out; a symbol counts as 2."""
        from sympy import Basic, MatrixBase, Number

        self._count("nodes")
        if isinstance(expression, MatrixBase):
            return self._largest(expression.flat())
        if not isinstance(expression, Basic):
            return 1.0, 1.0
        if isinstance(expression, Number):
            return _bits_of(expression), 1.0
        bits, terms = self._compound(expression)
        if bits > self._most_bits or terms > self._most_terms:
            raise TooCostly
        return bits, terms

    def _compound(self, expression: Any) -> tuple[float, float]:
        import sympy

        if isinstance(expression, (sympy.Integral, sympy.Limit, sympy.Derivative)):
            raise TooCostly
        if isinstance(expression, (sympy.Sum, sympy.Product)):
            return self._steps(expression)
        arguments = getattr(expression, "_unsorted_args", expression.args)
        if isinstance(expression, sympy.Pow):
            return self._power(*arguments)
        parts = [self.measure(argument) for argument in arguments]
        bits, terms = [part[0] for part in parts] or [1.0], [part[1] for part in parts] or [1.0]
        if isinstance(expression, (sympy.Add, sympy.MatAdd)):
            return max(bits) + math.log2(len(bits)), sum(terms)
        if isinstance(expression, (sympy.Mul, sympy.MatMul)):
            return sum(bits), math.prod(terms)
        if isinstance(expression, (sympy.factorial, sympy.binomial, sympy.gamma, sympy.factorial2, sympy.subfactorial)):
            return self._factorial(arguments, max(bits))
        if isinstance(expression, sympy.Function):
            self._count("functions")
            return (1.5 * 2.0 ** min(max(bits), 64) if isinstance(expression, sympy.exp) else max(bits) + 1.0), 1.0
        return max(bits), max(terms)

    def _power(self, base: Any, exponent: Any) -> tuple[float, float]:
        from sympy import Integer, Rational

        bits, terms = self.measure(base)
        exponent_bits, _ = self.measure(exponent)
        size = abs(float(exponent)) if isinstance(exponent, Rational) else 2.0 ** min(exponent_bits, 64)
        if not isinstance(exponent, Integer):
            self._count("roots")
        if terms > 1 and base.free_symbols:
            if size > MAX_TERMS:
                raise TooCostly
            whole = math.ceil(size)
            terms = math.comb(whole + math.ceil(terms) - 1, whole) if isinstance(exponent, Integer) else terms
        return max(bits, 1.0) * max(size, 1.0), terms

    def _factorial(self, arguments: Any, bits: float) -> tuple[float, float]:
        from sympy import Integer

        exact = [abs(int(argument)) for argument in arguments if isinstance(argument, Integer)]
        largest = max(exact) if len(exact) == len(arguments) else 2.0 ** min(bits, 64)
        if largest > MAX_FACTORIAL:
            raise TooCostly
        return largest * math.log2(largest + 2), 1.0

    def _steps(self, expression: Any) -> tuple[float, float]:
        """A sum or product over one index with whole limits; anything else has no bound that is known here."""
        from sympy import Integer, Product

        [(_, *limits)] = expression.limits if len(expression.limits) == 1 else [(None,)]
        if len(limits) != 2 or not all(isinstance(limit, Integer) for limit in limits):
            raise TooCostly
        count = int(limits[1]) - int(limits[0]) + 1
        if not 0 <= count <= MAX_STEPS:
            raise TooCostly
        bits, terms = self.measure(expression.function)
        bits += max(_bits_of(limit) for limit in limits)
        return (bits * count if isinstance(expression, Product) else bits + 7), terms * count

    def _largest(self, parts: Any) -> tuple[float, float]:
        measured = [self.measure(part) for part in parts]
        return max((bits for bits, _ in measured), default=1.0), max((terms for _, terms in measured), default=1.0)

    def _count(self, what: str) -> None:
        self._seen[what] += 1
        if self._seen[what] > MOST[what]:
            raise TooCostly


def _bits_of(number: Any) -> float:
    from sympy import Float, Rational

    if isinstance(number, Rational):
        return float(max(abs(number.p).bit_length(), abs(number.q).bit_length(), 1))
    if isinstance(number, Float):
        sign_mantissa_exponent_bits = number._mpf_
        return float(abs(sign_mantissa_exponent_bits[2]) + sign_mantissa_exponent_bits[3] + 1)
    return 1.0  # infinity, not a number
