"""docs/tutorial.md: its files are sound, and with --long its commands are run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.selftest import run_checks

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the page's files and the examples beside them."""
    (code,), (listed, settings) = blocks("python"), blocks("yaml")
    for name, text in (("sorting.py", code), ("sorting.yaml", listed), ("sorting-model.yaml", settings)):
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_environment_is_sound(here: Path) -> None:
    environment = find_environment("sorting:Sorting").from_options({})
    assert all(check.passed for check in run_checks(environment, 50))


@pytest.mark.long
def test_its_commands_end_where_the_page_says(here: Path) -> None:
    """Held-out pass@1 is below 0.65 after the supervised start and above 0.9 after GRPO; the page: 0.455 and 0.958."""
    install, *commands = blocks("bash")
    assert "tools/setup.sh" in install
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-euc", "\n".join(commands)], env=environment, check=True, timeout=1200)
    rows = [json.loads(line) for line in (here / "runs/sorting/grpo/metrics.jsonl").read_text().splitlines()]
    found = [row["val/sorting/pass@1"] for row in rows if "val/sorting/pass@1" in row]
    assert len(found) == 7
    assert found[0] < 0.65 and found[-1] > 0.9
    answers = [json.loads(line) for line in (here / "runs/sorting/answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == ["402137=", "999000="]
    assert all(len(answer["completion"]) == 6 for answer in answers)
