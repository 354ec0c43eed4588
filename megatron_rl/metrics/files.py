"""Small files written whole or not at all, and values made fit for strict JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Set
from numbers import Integral, Real
from pathlib import Path
from typing import Any


def write_text_atomic(path: Path, text: str) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Model output may hold lone surrogates, which UTF-8 refuses; a record must not fail on them.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomic(path: Path, value: object) -> None:
    """Write ``value`` as indented strict JSON, atomically."""
    write_text_atomic(path, json.dumps(to_plain(value), indent=2, allow_nan=False) + "\n")


def to_plain(value: object, *, null_nonfinite: bool = True) -> Any:
    """Reduce to what JSON and YAML know: mappings, lists, strings, numbers, booleans, ``None``.

    NaN and infinities become ``None`` (JSON has no word for them) unless ``null_nonfinite`` is off.
    Anything unknown, such as a path, becomes its string.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return None if null_nonfinite and not math.isfinite(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, null_nonfinite=null_nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, null_nonfinite=null_nonfinite) for item in value]
    if isinstance(value, Set):
        return [to_plain(item, null_nonfinite=null_nonfinite) for item in sorted(value, key=str)]
    return str(value)
