"""JSON files written whole or not at all, and values made fit for strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic


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
