"""The checkpoint benchmark: one small round from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.forks import run_python


def test_from_the_command_line(tmp_path: Path) -> None:
    record_path = tmp_path / "c.json"
    small = ["--shape", "32x1", "--vocab", "16", "--rounds", "1", "--updates", "2", "--folder", tmp_path]
    result = run_python("-m", "tools.benchmark.checkpoint", *small, "--json", record_path)
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads(record_path.read_text())
    assert record["median"].keys() >= {"copy", "save", "read", "load", "verified load", "updates with save"}
    assert all(seconds > 0 for seconds in record["median"].values())
    assert record["bytes"] > 100_000
    assert "updates with save in background" in result.stdout
    assert record["command"].startswith("python -m tools.benchmark.checkpoint --shape 32x1")
    assert record["hardware"] and record["date"]
    assert list(tmp_path.iterdir()) == [record_path], "the checkpoints stay behind"
