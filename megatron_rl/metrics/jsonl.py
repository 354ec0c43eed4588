"""The JSON files of a run. ``metrics.jsonl`` is its record, one strict JSON object a step.

For example, with a loss that was NaN::

    {"step": 12, "time": "2026-05-04T10:00:00.000+00:00", "actor/lr": 1e-06,
     "actor/pg_loss": null, "nonfinite": ["actor/pg_loss"]}
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.json_text import parse_json
from megatron_rl.user_files import read_json

logger = logging.getLogger(__name__)

_NO_METRICS = ("time", "nonfinite")


class JsonlWriter:
    """Appends one line per step, flushed at once: a kill loses at most that line.

    Rows after ``resume_step``, the step of the checkpoint, and a torn last line are cut away.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        keep = _bytes_to_keep(path, resume_step)
        dropped = path.stat().st_size - keep
        if dropped:
            logger.info("%s: dropped %d bytes", path.name, dropped)
        self.path = path
        self._file = path.open("r+b")
        self._file.truncate(keep)
        self._file.seek(keep)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row; NaN and infinities become null and are named under ``nonfinite``."""
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        row = {"step": step, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **to_plain(numbers)}
        nonfinite = [name for name in numbers if row[name] is None]
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._file.write(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read every row, in file order; damaged lines are skipped with one warning. No file, no rows."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        found = [_parse(line) for line in file]
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        logger.warning("%s: skipped %d damaged lines", path.name, len(found) - len(rows))
    return rows


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read one row per step, in order; a file joined by hand may hold a step twice."""
    merged: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def _bytes_to_keep(path: Path, resume_step: int | None) -> int:
    end = 0
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            after_resume = resume_step is not None and row is not None and row["step"] > resume_step
            if after_resume or not line.endswith(b"\n"):
                break
            end += len(line)
    return end


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a row; None for a damaged line."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("time", ""), str)
    return row if is_row and all(name in _NO_METRICS or _is_metric(value) for name, value in row.items()) else None


def _is_metric(value: object) -> bool:
    """A number that a float holds, or None for NaN."""
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty when the file is absent or damaged."""
    try:
        value = read_json(path)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def write_json_atomic(path: Path, value: object) -> None:
    """Write ``value`` as indented strict JSON, atomically."""
    write_text_atomic(path, json.dumps(to_plain(value), indent=2, allow_nan=False) + "\n")


def to_plain(value: object) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value
