"""Text to typed values, and whether a value is allowed."""

from __future__ import annotations

import math
from typing import Any

from megatron_rl.config.fields import Flag

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def convert(flag: Flag, text: str) -> Any:
    """One value of ``flag`` from its text; ``ValueError`` says what was expected instead."""
    if flag.kind is bool:
        value = _boolean(text)
    elif flag.kind is int:
        value = _whole_number(text)
    elif flag.kind is float:
        value = _number(text)
    else:
        value = text
    problem = refusal(flag, value)
    if problem is not None:
        raise ValueError(problem)
    return value


def refusal(flag: Flag, value: Any) -> str | None:
    """Why ``value`` is not allowed: not a choice, or out of bounds. None if it is."""
    if flag.choices and value not in flag.choices:
        return f"is not {_listed(flag.choices)}, got {value!r}"
    limits = flag.declaration
    for bound, words, broken in (
        (limits.ge, "at least", lambda bound: value < bound),
        (limits.gt, "above", lambda bound: value <= bound),
        (limits.le, "at most", lambda bound: value > bound),
        (limits.lt, "below", lambda bound: value >= bound),
    ):
        if bound is not None and broken(bound):
            return f"must be {words} {bound}, got {value}"
    return None


def _listed(choices: tuple[Any, ...]) -> str:
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"is not true or false, got {text!r}")
    return _BOOLEANS[text.lower()]


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"is not a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"is not a number, got {text!r}") from None
    # A NaN passes every bound, because each comparison with it is false.
    if not math.isfinite(value):
        raise ValueError(f"is not a finite number, got {text!r}")
    return value
