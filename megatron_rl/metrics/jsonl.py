"""The JSON files of a run. ``metrics.jsonl`` is its record, one strict JSON object a step.

For example, with a loss that was NaN::

    {"step": 12, "time": "2026-05-04T10:00:00.000+00:00", "actor/lr": 1e-06,
     "actor/pg_loss": null, "nonfinite": ["actor/pg_loss"]}
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Set
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic

logger = logging.getLogger(__name__)

RESERVED = frozenset({"step", "time", "nonfinite"})


class JsonlWriter:
    """Appends one line a step and hands it to the operating system at once: a kill loses at most that line.

    Rows after ``resume_step``, the step of the checkpoint, are cut away, so that no step appears twice; without
    it every whole row is kept. A torn last line is always cut away.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        keep, self._last_step = _find_end(path, resume_step)
        dropped = path.stat().st_size - keep
        if dropped:
            logger.info("%s: dropped %d bytes after step %s", path.name, dropped, self._last_step)
        self._now = now
        self._file = path.open("r+b")
        self._file.truncate(keep)
        self._file.seek(keep)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} came after those of step {self._last_step}; a step has one row, "
                "so merge its metrics (evaluation included) into one write"
            )
        row = make_row(step, self._now(), metrics)
        self._file.write(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def make_row(step: int, time: datetime, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The JSON object of a step; NaN and infinities become null and are named under ``nonfinite``."""
    clash = RESERVED.intersection(metrics)
    if clash:
        raise ValueError(f"metric names {sorted(clash)} are taken by the row itself; rename them")
    numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
    nonfinite = [name for name, number in numbers.items() if not math.isfinite(number)]
    row: dict[str, Any] = {"step": step, "time": time.isoformat(timespec="milliseconds")}
    row.update({name: number if math.isfinite(number) else None for name, number in numbers.items()})
    if nonfinite:
        row["nonfinite"] = nonfinite
    return row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every readable row, in file order; damaged lines are skipped with one warning. No file, no rows."""
    if not path.exists():
        return []
    rows, damaged = [], 0
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            if row is None:
                damaged += 1
            else:
                rows.append(row)
    if damaged:
        logger.warning("%s: skipped %d damaged lines", path.name, damaged)
    return rows


def _find_end(path: Path, resume_step: int | None) -> tuple[int, int | None]:
    """Bytes to keep and the step of the last row among them."""
    end, last_step = 0, None
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            after_resume = resume_step is not None and row is not None and row["step"] > resume_step
            if after_resume or not line.endswith(b"\n"):
                break
            end += len(line)
            last_step = row["step"] if row is not None else last_step
    return end, last_step


def _parse(line: bytes) -> dict[str, Any] | None:
    """A row, or ``None`` for a line that is not one (torn by a kill, or zeroed by a lost disk write)."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file is absent or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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
