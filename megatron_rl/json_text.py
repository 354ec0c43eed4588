"""JSON that somebody else wrote or will read.

``dumps`` and ``loads`` are strict: NaN and infinity, which Python would write and read, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""What is deeper than Python's own limit of about 1000 could be read and then not be written again."""
MAX_VALUES = 1_000_000
"""At one depth; a few lists that hold each other many times are more than any memory when they are written."""


def parse_json(text: str | bytes) -> Any:
    """As ``json.loads``; ``ValueError`` also for what is nested too deeply, where that has a RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value: object) -> str:
    """Strict JSON text; ``ValueError`` for NaN and infinity."""
    return json.dumps(value, allow_nan=False)


def loads(text: bytes | str) -> Any:
    """The value of strict JSON text; ``ValueError`` for anything else, hostile nesting and repeated keys included."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def first_value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at ``start``, and where it ends; as strict as ``loads``."""
    try:
        return _STRICT.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values of one key nobody can say which is meant."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key[:80]!r} occurs twice")
        value[key] = item
    return value


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)


def check_bounds(value: object) -> None:
    """``ValueError`` for a value nested too deeply or too large, or that holds a lone surrogate.

    Not by recursion, which has a depth limit of its own.
    """
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below += [*item.values(), *item]
            elif isinstance(item, (list, tuple)):
                below += item
            elif isinstance(item, str):
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ValueError(f"a text holds the lone surrogate U+{ord(item[error.start]):X}") from None
            if len(below) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES:,} values")
        level, depth = below, depth + 1
