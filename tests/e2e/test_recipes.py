"""Every recipe's rehearsal: all its stages with a tiny random model on two CPU ranks, twice where it says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.recipes import EXAMPLES, SCRIPTS

pytestmark = pytest.mark.long


def _rehearse(script: Path, folder: Path, *flags: str) -> str:
    environment = os.environ | {"REHEARSALS": str(folder)}
    command = ["bash", str(script), "--rehearse", *flags]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_stage_runs_and_answers_are_rewarded(script: Path, tmp_path: Path) -> None:
    table = _rehearse(script, tmp_path).rpartition("stage ")[2]
    graded = re.search(r"train .* 2 steps, (\d+) answers graded, (\d+) of them right", table)
    assert 0 < int(graded[2]) < int(graded[1])
    assert re.search(r"evaluate .* pass@1 0\.\d{3}", table)
    assert list((tmp_path / script.parent.name / f"{script.stem}.rehearsal" / "hf").glob("*.safetensors"))


def test_a_second_rehearsal_begins_anew(tmp_path: Path) -> None:
    script = EXAMPLES / "qwen3_30b_a3b_fp8" / "fp8_rollouts.sh"
    for steps in ("1", "2"):
        assert f"{steps} steps" in _rehearse(script, tmp_path, "--train-iters", steps)


def test_an_evaluation_of_every_checkpoint(tmp_path: Path) -> None:
    _rehearse(EXAMPLES / "flash_rl_gsm8k" / "eval.sh", tmp_path)
    rows = (tmp_path / "flash_rl_gsm8k" / "eval.rehearsal" / "all" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
