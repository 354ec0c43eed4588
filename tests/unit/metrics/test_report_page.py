"""What the report's script puts on the page; it runs in node, on as much of a DOM as it asks for."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.metrics.jsonl import JsonlWriter
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.types import Completion, Grade, Rollout, RolloutGroup, SourcedTask, Task
from tests.support.records import write_rollouts

PAGE = Path(__file__).parents[2] / "support" / "page.js"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the page's script")

GRADES = (
    Grade(-1.0, status="wrong", extracted="<b>35</b>"),
    Grade(1.0, status="correct", extracted="34"),
    Grade(-1.0, status="no_answer"),
    Grade(None, code="timeout", message="slow"),
)
WORDS = {9: "6*7?", 0: "calls ", 1: "<tool>", 2: "42", 3: "</tool>", 4: "so\n42"}


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, Any]:
    """A step of four samples, in the first of which the environment wrote tokens 1 to 3; and an evaluation."""
    run = RunDirectory(tmp_path)
    run.create({}, {}, ["train"])
    completion = Completion(tuple(range(5)), (-0.5,) * 5, "stop", policy_version=0)
    rollouts = tuple(Rollout(completion, "calls 42", grade) for grade in GRADES)
    group = RolloutGroup(SourcedTask("dapo", Task("7", "p")), (9,), rollouts)
    path = run.rollouts_path(1)
    write_rollouts(path, 1, [group], decode_raw=lambda ids: "".join(map(WORDS.__getitem__, ids)))
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), "environment_spans": [[1, 4]]}), *rest]) + "\n")
    write_rollouts(run.evaluation_path(1), 1, [replace(group, rollouts=rollouts[1:2])], greedy=[True])
    measures = {"val/aime/pass@1": 0.5, "val/aime/pass@1_ci95": 0.1}
    JsonlWriter(run.metrics).write(1, {"critic/rewards/mean": 0.5, **measures})
    command = [NODE, str(PAGE), str(write_report(tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_page(shown: dict[str, Any]) -> None:
    assert shown["evaluation"] == ["environment", "pass@1 = avg@k", "aime", "0.500 \u00b1 0.100"]
    assert shown["steps"] == ["step 1", "held-out, step 1"]
    assert shown["opened"] == "step 1"
    newest = shown["views"]["held-out, step 1"]
    assert newest["counts"] == ["correct 1"]
    assert "greedy" in newest["samples"][0]
    wrong, right, silent, failed = shown["views"]["step 1"]["samples"]
    assert wrong.startswith("reward -1wronganswer <b>35</b>")
    assert "5 tokens \u00b7 3 of them from the environment" in wrong
    assert right.startswith("reward 1correctanswer 34")
    assert silent.startswith("reward -1no answerdapo 7")
    assert failed.startswith("not gradeddapo 7") and "timeout: slow" in failed
    assert shown["views"]["step 1"]["counts"] == ["wrong 1", "correct 1", "no answer 1", "not graded 1"]


def test_the_environments_tokens_stand_apart_and_without_a_logprob(shown: dict[str, Any]) -> None:
    view = shown["views"]["step 1"]
    assert view["environment"] == ["<tool>42</tool>"]
    assert view["coloured"] == ["calls ", "so\u21b5\n42"]
    assert view["coloured_of_second"] == ["calls ", "<tool>", "42", "</tool>", "so\u21b5\n42"]


def test_a_count_is_a_filter(shown: dict[str, Any]) -> None:
    [only] = shown["views"]["step 1, filtered"]["samples"]
    assert only.startswith("reward -1wrong")
