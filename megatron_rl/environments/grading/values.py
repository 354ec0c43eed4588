"""Equality of parsed values: constants exactly, expressions with unknowns at points.

math-verify compares to 6 or 15 decimal places, so that 10^-20 is 10^-21 to it. Here only a decimal has a tolerance, and
never towards an integer or a decimal of as many digits: neither 33.99999999 is 34 nor 1.0000001 is 1.0000004.
"""

from __future__ import annotations

from typing import Any

MAX_PRECISION = 400
"""Digits worked out to tell two irrational numbers apart; numbers that agree so far are equal."""
TOLERANCE, MOST_OF_VALUE, ROUNDING = 5e-7, 5e-5, 1e-12
"""Of a decimal, absolute and relative; of floating point, relative."""
POINTS = ((5, 7, 13), (31, 11, 17), (-5, 7, 11), (-7, -3, 5))
"""Values of the unknowns: numerator of the first, what each further one adds, and denominator."""


def same(wanted: Any, found: Any) -> bool | None:
    """Return whether two expressions are equal; None where numbers cannot tell, as with sums and unknown functions.

    ln(ab) is ln(a) + ln(b), which are equal wherever both are real; an absolute value counts on the whole line, so
    ln|x| is not ln(x).
    """
    import sympy

    both = wanted, found
    series = sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.MatrixExpr
    if not all(isinstance(side, sympy.Expr) and not side.has(*series) for side in both):
        return None
    names = sorted({symbol.name for side in both for symbol in side.free_symbols})
    try:
        if not names:
            return _same_constants(*both)
        verdicts = [_same_at(both, names, *point) for point in POINTS]
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError):
        return None
    return False if False in verdicts else True if verdicts.count(True) > 1 else None


def _same_at(both: tuple[Any, Any], names: list[str], first: int, step: int, divisor: int) -> bool | None:
    from sympy import Abs, Rational

    values = {name: Rational(first + step * number, divisor) for number, name in enumerate(names)}
    points = [{symbol: values[symbol.name] for symbol in side.free_symbols} for side in both]
    sides = [_real_value(side, point) for side, point in zip(both, points, strict=True)]
    if None in sides:
        return False if sides.count(None) == 1 and both[0].has(Abs) != both[1].has(Abs) else None
    return _is_zero(sides[0] - sides[1])


def _real_value(expression: Any, point: dict[Any, Any]) -> Any:
    """The value at a point; None where it is not real, or a root or logarithm is of a negative number."""
    from sympy import Pow, log

    inner = [node.args[0] for node in expression.atoms(Pow, log) if not (node.is_Pow and node.exp.is_Integer)]
    value = _exact(expression.xreplace(point))
    number = value.evalf(chop=True)
    is_real = number.is_Number and number.is_finite
    return value if is_real and not any(_exact(part.xreplace(point)).is_negative for part in inner) else None


def _same_constants(wanted: Any, found: Any) -> bool | None:
    from sympy import Float

    exact = [_exact(side) for side in (wanted, found)]
    difference = exact[0] - exact[1]
    zero = exact[0] == exact[1] or _is_zero(difference)
    decimals = [side.has(Float) and value.is_Rational for side, value in zip((wanted, found), exact, strict=True)]
    if zero is not False or not any(decimals) or any(value.is_Integer for value in exact):
        return zero
    distance, size = abs(difference.evalf()), abs(exact[0].evalf())
    allowed = min(TOLERANCE, MOST_OF_VALUE * size)
    if all(decimals):  # one has to be the other, rounded
        digits = min(next((n for n in range(MAX_PRECISION) if 10**n % value.q == 0), MAX_PRECISION) for value in exact)
        allowed = max(ROUNDING * size, min(allowed, 10.0**-digits / 2))
    return bool(distance <= allowed)


def _exact(expression: Any) -> Any:
    """The value, with decimals as fractions."""
    from sympy import Float, Rational

    return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)}).doit()


def _is_zero(difference: Any) -> bool | None:
    parts = difference.evalf(100, maxn=MAX_PRECISION).as_real_imag()
    if not all(part.is_Number for part in parts):
        return None
    # a precision of one bit means that all digits have cancelled
    return all(part == 0 or (part.is_Float and part._prec == 1) for part in parts)
