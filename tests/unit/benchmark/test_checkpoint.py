"""The checkpoint benchmark: its ratios by hand, and one small round from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forks import run_python
from tools.benchmark.checkpoint import WAYS, summarise

FIRST = {"copy": 1.0, "save": 4.0, "read": 0.5, "load": 1.0, "verified load": 2.0}
SECOND = {"copy": 3.0, "save": 6.0, "read": 0.5, "load": 2.0, "verified load": 5.0}
ROUNDS = [
    FIRST | {"updates": 1.0, "updates with save": 5.0, "updates with save in background": 1.5},
    SECOND | {"updates": 2.0, "updates with save": 8.0, "updates with save in background": 2.25},
    SECOND | {"updates": 2.0, "updates with save": 8.5, "updates with save in background": 4.0},
]


def test_the_medians_and_the_ratios_of_each_round() -> None:
    summary = summarise(ROUNDS, size=12_000_000)
    assert summary["seconds"]["save"] == 6.0
    assert summary["spread"]["save"] == [4.0, 6.0]
    assert summary["megabytes_per_second"]["save"] == pytest.approx(2.0)
    assert summary["relative_speed"] == pytest.approx({"save": 0.5, "load": 0.25, "verified load": 0.1})
    assert summary["relative_speed_spread"]["save"] == [0.25, 0.5]
    assert summary["stolen_seconds"] == {"updates with save": 6.0, "updates with save in background": 0.5}
    assert summary["stolen_spread"]["updates with save"] == [4.0, 6.5]


def test_by_its_path_from_the_command_line(tmp_path: Path) -> None:
    record_path = tmp_path / "c.json"
    small = ["--shape", "32x1", "--vocab", "16", "--rounds", "1", "--updates", "2", "--folder", tmp_path]
    result = run_python("tools/benchmark/checkpoint.py", *small, "--json", record_path)
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads(record_path.read_text())
    assert set(record["megabytes_per_second"]) == set(WAYS)
    assert all(speed > 0 for speed in record["megabytes_per_second"].values())
    assert record["bytes"] > 100_000
    assert "updates with save in background: " in result.stdout
    assert record["command"].startswith("python -m tools.benchmark.checkpoint --shape 32x1")
    assert record["hardware"] and record["date"]
    assert list(tmp_path.iterdir()) == [record_path], "the checkpoints stay behind"
