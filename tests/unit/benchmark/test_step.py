"""The GRPO step against TRL's, in small; and what is worked out by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.environments.base import Environment
from megatron_rl.errors import MegatronRLError
from tests.unit.benchmark.test_quantization import run
from tools.benchmark import step
from tools.benchmark.step_task import Judge, QuickstartTask

SMALL = [
    *("--shape=32x1", "--prompts=2", "--group=2", "--new-tokens=4"),
    *("--warm-start=1", "--rounds=1", "--keep-groups-without-signal"),
]


def record_of(path: Path, *arguments: str) -> dict[str, Any]:
    shown = run(["-m", "tools.benchmark.step"], *SMALL, *arguments, "--json", str(path))
    assert "CPU s / step" in shown
    record = json.loads(path.read_text())
    assert record["hardware"] and record["date"] and record["versions"]["torch"]
    assert record["command"].startswith("python -m tools.benchmark.step --shape=32x1")
    assert all(seconds > 0 for seconds in record["cpu_seconds_per_step"].values())
    assert all(1 <= work["tokens_per_completion"] <= 4 for work in record["work"].values())
    return record


def test_ours_alone(tmp_path: Path) -> None:
    record = record_of(tmp_path / "s.json", "--against", "nobody")
    assert set(record["cpu_seconds_per_step"]) == {"ours"}
    assert record["ratio"] == {}


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: see tools/benchmark/step.py")
def test_against_trl(tmp_path: Path) -> None:
    record = record_of(tmp_path / "s.json")
    assert set(record["cpu_seconds_per_step"]) == {"ours", "trl"}
    assert record["ratio"]["ours/trl"] == pytest.approx(1 / record["ratio"]["trl/ours"])


def test_without_trl_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tools.benchmark.trl_step", None)  # importing it fails
    assert step.trl_step(None, None, None, 1, Path()) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install trl==1.16.0 -c constraints.txt" in line


def test_ratios_are_of_seconds_and_of_the_same_round() -> None:
    rounds = [{"ours": 4.0, "trl": 2.0}, {"trl": 1.0, "ours": 4.0}, {"ours": 1.0, "trl": 0.125}]  # steps a second
    summary = step.summarise(rounds)
    assert summary["cpu_seconds_per_step"] == {"ours": 0.25, "trl": 1.0}
    assert summary["ratio"] == {"ours/trl": 0.25, "trl/ours": 4.0}
    assert summary["spread"]["trl"] == [0.5, 8.0]


def judge(rewards: list[float], lengths: list[int]) -> Judge:
    return Judge(None, rewards, lengths)


def test_the_same_policy_has_the_same_rewards_and_lengths() -> None:
    ours = judge([0.0, 1.0] * 500, [10, 12] * 500)
    step.require_same_work(ours, judge([0.0, 1.0, 1.0, 0.0] * 200, [12, 10] * 400))
    with pytest.raises(MegatronRLError, match="mean lengths differ, 11.000 and 12.000"):
        step.require_same_work(ours, judge([0.0, 1.0] * 500, [11, 13] * 500))
    with pytest.raises(MegatronRLError, match="mean rewards differ"):
        step.require_same_work(ours, judge([1.0] * 1000, [10, 12] * 500))


def test_the_judge_is_the_environments_grader(tmp_path: Path) -> None:
    task = QuickstartTask.build(tmp_path, prompts_per_step=3, seed=1)
    assert len(task.tasks) % 3 == 0
    assert task.of_step(0) != task.of_step(1)
    assert task.of_step(len(task.tasks) // 3) == task.of_step(0)
    graded: Environment = task.environment
    seen, (first, *_) = Judge(graded), task.of_step(0)
    gold = graded.gold_answer(first)
    assert seen(first, gold, len(gold) + 1, ended=True) == 1.0
    assert seen(first, gold, len(gold), ended=False) == 0.0
    assert seen.facts() == {"reward": 0.5, "tokens_per_completion": len(gold) + 0.5}


def test_a_micro_batch_that_does_not_divide_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.parse(["--trl-micro-batch", "100"])
    assert "--trl-micro-batch 100 does not divide the 256 samples of a step" in capsys.readouterr().err
