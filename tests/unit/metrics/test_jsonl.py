"""The record of a run: strict JSON, no step twice, at most one line lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_rl.metrics.jsonl import JsonlWriter, read_rows, read_steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A record of steps 1 to 4."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(1, 5):
        writer.write(step, {"loss": step / 2})
    writer.close()
    return path


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_row_is_strict_json_with_nonfinite_values_named(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(3, {"a": 0.5, "b": float("nan"), "c": float("-inf"), "n": 7})
    line = (tmp_path / "metrics.jsonl").read_text()
    time = r"[\d-]{10}T[\d:]{8}\.\d{3}\+00:00"
    rest = '"a": 0.5, "b": null, "c": null, "n": 7, "nonfinite": ["b", "c"]}\n'
    assert re.fullmatch(f'{{"step": 3, "time": "{time}", {re.escape(rest)}', line)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_line_is_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"a": 1.0})
    assert steps(tmp_path / "metrics.jsonl") == [1]


def test_resume_by_step_cuts_later_rows(path: Path) -> None:
    writer = JsonlWriter(path, resume_step=2)
    writer.write(3, {"loss": 9.0})
    assert steps(path) == [1, 2, 3]
    assert read_rows(path)[-1]["loss"] == 9.0


@pytest.mark.parametrize("tail", [b'{"step": 5, "lo', b'{"step": 5}', b"\0\0\0"])
def test_torn_last_line_is_cut(path: Path, tail: bytes) -> None:
    with path.open("ab") as file:
        file.write(tail)
    writer = JsonlWriter(path)
    writer.write(5, {"loss": 0.0})
    assert steps(path) == [1, 2, 3, 4, 5]
    assert all(line.endswith(b"}\n") for line in path.open("rb"))


def test_damaged_line_is_skipped_by_readers(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 20 + b"\n" + lines[2])
    assert steps(path) == [1, 3]
    assert "skipped 1 damaged lines" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 9, "loss": ' + "[" * 9999 + "]" * 9999 + "}",
        '{"step": 9, "loss": ' + "9" * 4000 + "}",
        '{"step": ' + "9" * 4000 + "}",
        '{"step": 9, "loss": 1e999}',
        '{"step": 9, "loss": NaN}',
        '{"step": 9, "loss": "low"}',
        '{"step": 9, "time": 3}',
    ],
    ids=lambda line: line[:24],
)
def test_a_line_that_no_run_wrote_is_skipped(path: Path, caplog: pytest.LogCaptureFixture, line: str) -> None:
    """The first ended `report` and `compare` with a traceback, as most of the others did."""
    with path.open("a") as file:
        file.write(f"{line}\n")
    assert steps(path) == [1, 2, 3, 4]
    assert "skipped 1 damaged lines" in caplog.text


def test_reading_no_file_gives_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "absent.jsonl") == []


def test_a_step_that_a_joined_file_has_twice_is_one_row(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"step": 2, "loss": 7.0}\n{"step": 1, "reward": 0.5}\n')
    found = read_steps(path)
    assert [(row["step"], row["loss"], row.get("reward")) for row in found[:2]] == [(1, 0.5, 0.5), (2, 7.0, None)]
    assert len(found) == 4
