"""examples/newcomer/run.sh: what a new user tries first, each as the documents say it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY


@pytest.mark.long
def test_every_task_works_and_is_in_the_table(tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / "newcomer" / "run.sh"
    command = ["bash", str(script), "--run-dir", str(tmp_path / "newcomer")]
    run = subprocess.run(command, capture_output=True, text=True)
    logs = {path.stem: path.read_text()[-2000:] for path in (tmp_path / "newcomer" / "logs").glob("*.txt")}
    failed = re.findall(r"^(\w+) .*FAILED", run.stdout, re.MULTILINE)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}" + "\n".join(f"{name}: {logs[name]}" for name in failed)
    table = (REPOSITORY / "docs" / "measurements" / "newcomer.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == re.findall(r"^(\w+) .* ok$", run.stdout, re.MULTILINE)
