"""JSON that somebody else wrote or will read.

``dumps`` and ``loads`` are strict: NaN and infinity, which Python would write and read, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Far below Python's own limit of about 1000."""
MAX_VALUES = 1_000_000
"""At one depth: a few lists that hold each other many times are more than any memory."""


def parse_json(text: str | bytes) -> Any:
    """Parse as ``json.loads``, with a ``ValueError`` for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value: object) -> str:
    """Write strict JSON; ``ValueError`` for NaN and infinity."""
    return json.dumps(value, allow_nan=False)


def loads(text: bytes | str) -> Any:
    """Parse strict JSON; ``ValueError`` also for deep nesting and repeated keys."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def first_value(text: str, start: int) -> tuple[Any, int]:
    """Parse the value that begins at ``start`` as strictly; returns it and where it ends."""
    try:
        return _STRICT.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key[:80]!r} occurs twice")
        value[key] = item
    return value


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)


def check_bounds(value: object) -> None:
    """Raise ``ValueError`` for a value nested too deeply, too large, or with a lone surrogate."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        below: list[object] = []
        for item in level:
            if isinstance(item, str):  # first, as most are texts, and a mapping is slow to ask for
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ValueError(f"a text holds the lone surrogate U+{ord(item[error.start]):X}") from None
            elif isinstance(item, (list, tuple)):
                below += item
            elif isinstance(item, Mapping):
                below += [*item.values(), *item]
            if len(below) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES:,} values")
        level, depth = below, depth + 1
