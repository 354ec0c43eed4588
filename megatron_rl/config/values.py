"""Text to typed values, and whether a value is allowed."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

from megatron_rl.config.fields import Flag
from megatron_rl.errors import shorten

_LONGEST_NAME, _LONGEST_PATH = 255, 3072
"""Bytes of one name, and of a whole path that leaves room for the names of files below it; Linux takes 4096."""
_LARGEST = 2**31 - 1
"""Whole numbers without a bound of their own: what torch and its collectives take as a size."""
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
    """Why ``value`` is not allowed: not a choice, out of bounds, or no path. None if it is."""
    if flag.choices and value not in flag.choices:
        return f"is not {_listed(flag.choices)}, got {shorten(value)}"
    if flag.declaration.path:
        return _path_refusal(value)
    limits = flag.declaration
    most = _LARGEST if flag.kind is int and limits.le is None and limits.lt is None else limits.le
    for bound, words, broken in (
        (limits.ge, "at least", lambda bound: value < bound),
        (limits.gt, "above", lambda bound: value <= bound),
        (most, "at most", lambda bound: value > bound),
        (limits.lt, "below", lambda bound: value >= bound),
    ):
        if bound is not None and broken(bound):
            return f"must be {words} {bound}, got {shorten(value)}"
    return None


def _path_refusal(path: str) -> str | None:
    if not path.strip():
        return "is empty; name a path, or leave the flag out"
    # Cs: bytes that are not UTF-8 arrive as halves of surrogate pairs.
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in path):
        return f"has a line break, another control character or a broken one, got {shorten(path)}; use another name"
    longest = max(len(name.encode()) for name in path.split("/"))
    if longest > _LONGEST_NAME or len(path.encode()) > _LONGEST_PATH:
        return (
            f"is too long for a file system, which takes names of {_LONGEST_NAME} bytes and here {_LONGEST_PATH} "
            f"altogether, got {shorten(path)}; use a shorter one"
        )
    return None


def _listed(choices: tuple[Any, ...]) -> str:
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"is not true or false, got {shorten(text)}")
    return _BOOLEANS[text.lower()]


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"is not a whole number, got {shorten(text)}") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"is not a number, got {shorten(text)}") from None
    # A NaN passes every bound, because each comparison with it is false.
    if not math.isfinite(value):
        raise ValueError(f"is not a finite number, got {shorten(text)}")
    return value
