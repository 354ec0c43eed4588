"""What the report's script puts on the page; it runs in node, on as much of a DOM as it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.metrics.jsonl import JsonlWriter
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.rollouts import rows_by_group, write_rows
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.types import Completion, Grade, Rollout, RolloutGroup, SourcedTask, Task
from tests.support.pages import NODE, shown_by
from tests.support.records import write_rollouts
from tests.support.rollouts import drawn, group_of, sample_of, told

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the page's script")

GRADES = (
    Grade(-1.0, status="wrong", extracted="<b>35</b>"),
    Grade(1.0, status="correct", extracted="34"),
    Grade(1.0, status="correct", extracted="34"),
    Grade(-1.0, status="no_answer"),
    Grade(None, code="timeout", message="slow"),
)
WORDS = {0: "calls ", 1: "<tool>", 2: "42", 3: "</tool>", 4: "so\n42", 8: "<bos>6*7?", 9: "6*8?"}


def spelled(ids: Sequence[int]) -> str:
    return "".join(map(WORDS.__getitem__, ids))


def run_page(run: RunDirectory) -> dict[str, Any]:
    return shown_by(write_report(run.path))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Step 1 of five samples, in the first of which the environment wrote tokens 1 to 3; step 2; an evaluation."""
    run = RunDirectory(tmp_path)
    run.create({}, {}, ["train", "<b>"])
    completion = Completion(tuple(range(5)), (-0.5,) * 5, "stop", policy_version=0)
    rollouts = tuple(Rollout(completion, "calls 42", told(grade)) for grade in GRADES)
    group = RolloutGroup(SourcedTask("dapo", Task("7", "p", {"gold": "42"})), (8,), rollouts)
    path = run.rollouts_path(1)
    [rows] = rows_by_group(1, [group], spelled)
    rows[0] |= {"environment_spans": [(1, 4)], "advantage": 0.25}
    write_rows(path, rows)
    cut = replace(completion, finish_reason="length")
    texts = ("no", "\n".join("abcdefghij"))
    plain = tuple(Rollout(cut, text, told(Grade(float(right)))) for right, text in enumerate(texts))
    write_rollouts(run.rollouts_path(2), 2, [RolloutGroup(group.source, (9,), plain)], decode_raw=spelled)
    held_out = replace(group, rollouts=rollouts[1:2])
    write_rollouts(run.evaluation_path(1), 1, [held_out], decode_raw=spelled, greedy=[True])
    measures = {"val/aime/pass@1": 0.5, "val/aime/pass@1_ci95": 0.1}
    JsonlWriter(run.metrics).write(1, {"critic/rewards/mean": 0.5, "actor/ppo_kl": 0.0, **measures})
    return run


@pytest.fixture
def shown(run: RunDirectory) -> dict[str, Any]:
    return run_page(run)


def test_results_and_curves_come_first_and_the_command_last(shown: dict[str, Any]) -> None:
    assert shown["order"] == ["report-data", "tip", "header", "results", "curves", "rollouts", "run"]
    assert shown["header"].endswith("training reward0.5aime pass@10.5")
    assert shown["results"][:4] == ["environment", "pass@1 = avg@k", "aime", "0.500 \u00b1 0.100"]
    assert "train '<b>'" in shown["run"]


def test_what_never_moved_from_0_is_named_and_not_drawn(shown: dict[str, Any]) -> None:
    assert [card["title"] for card in shown["drawn"]] == ["Training reward", "Held-out: aime"]
    assert "Always 0: KL divergence." in shown["curves"]


def test_a_group_says_what_its_samples_were_worth(shown: dict[str, Any]) -> None:
    view = shown["views"]["step 1"]
    assert shown["steps"] == ["step 1", "step 2", "held-out, step 1", "all steps"]
    assert shown["opened"] == "step 2"
    [about] = view["groups"]  # rewards -1, 1, 1, -1 of the four that were graded
    assert about == "dapo7right answer 42mean reward 0 \u00b7 5 samples \u00b7 2 correct"
    assert view["prompts"] == ["<bos>6*7?"]
    wrong, right, silent, failed = view["samples"]
    assert wrong.startswith("wrongreward -1answer <b>35</b>advantage 0.25 \u00b7 5 tokens \u00b7 3 of them from the")
    assert right.startswith("correctreward 12 identicalanswer 34")
    assert silent.startswith("no answerreward -1")
    assert failed.startswith("not graded") and "timeout: slow" in failed
    assert view["counts"] == ["correct 2", "no answer 1", "not graded 1", "wrong 1"]
    assert "greedy" in shown["views"]["held-out, step 1"]["samples"][0]


def test_without_a_verdict_the_reward_decides_and_a_cut_answer_says_so(shown: dict[str, Any]) -> None:
    wrong, right = shown["views"]["step 2"]["samples"]
    assert wrong.startswith("wrongreward 0cut at the limit")
    assert right.startswith("correctreward 1cut at the limit")
    assert shown["views"]["step 2"]["groups"] == [
        "dapo7right answer 42mean reward 0.5 \u00b7 2 samples \u00b7 1 correct \u00b7 2 cut at the limit"
    ]


def test_the_environments_tokens_stand_apart_and_without_a_logprob(shown: dict[str, Any]) -> None:
    view = shown["views"]["step 1"]
    assert view["environment"] == ["<tool>42</tool>"]
    assert view["coloured"][:2] == [["calls ", "so\u21b5\n42"], ["calls ", "<tool>", "42", "</tool>", "so\u21b5\n42"]]


def test_a_replay_is_linked_from_its_group(run: RunDirectory) -> None:
    run.replays.mkdir()
    for name in ("step_000001_group_0.html", "step_000001_group_0_sample_3.html", "step_000002_group_1.html", "x.html"):
        (run.replays / name).touch()
    [rows] = rows_by_group(1, [group_of(sample_of(1.0, ([8], drawn([0]))), prompt_ids=(8,))], spelled)
    write_rows(run.rollouts_path(1), [row | {"group": 0} for row in rows])
    views = run_page(run)["views"]
    assert "group 0" in views["step 1"]["groups"][0]
    assert views["step 1"]["links"] == [
        ["replay", "replays/step_000001_group_0.html"],
        ["replay of sample 3", "replays/step_000001_group_0_sample_3.html"],
    ]
    assert views["step 2"]["links"] == [], "group 1 of step 2 is not on the page"


def test_a_count_is_a_filter(shown: dict[str, Any]) -> None:
    [only] = shown["views"]["filtered"]["samples"]
    assert only.startswith("correctreward 1")


def test_search_finds_text_in_all_steps(shown: dict[str, Any]) -> None:
    """Prompts and answers, whatever the case: step 1 and the evaluation have it, step 2 has not."""
    groups = shown["views"]["searched"]["groups"]
    assert [about.split("dapo")[0] for about in groups] == ["step 1", "held-out, step 1"]


def test_long_texts_are_folded_until_asked(run: RunDirectory) -> None:
    """An answer of ten lines, in the only step there is."""
    run.rollouts_path(1).unlink()
    run.evaluation_path(1).unlink()
    shown = run_page(run)
    assert shown["views"]["step 2"]["folded"] == [False, True]
    assert shown["views"]["unfolded"]["folded"] == [False, False]


def test_branches_stand_below_the_sequence_that_they_left(run: RunDirectory) -> None:
    tree = sample_of(1.0, ([8], drawn([0, 2])), ([8, 0, 1], drawn([4], finish_reason="length")), ([9], drawn([3])))
    write_rollouts(run.rollouts_path(1), 1, [group_of(tree, prompt_ids=(8,))], decode_raw=spelled)
    view = run_page(run)["views"]["step 1"]
    [sample] = view["samples"]
    assert "sample 0 \u00b7 3 sequences" in sample
    first = "cut at the limitsequence 2 \u00b7 after the first 2 tokens of sequence 1 \u00b7 1 token<tool>so\u21b5\n42"
    assert first in sample
    assert sample.endswith("sequence 3 \u00b7 new conversation \u00b7 1 token \u00b7 ended: stop6*8?</tool>")
    assert view["prompts"] == ["<bos>6*7?", "<tool>", "6*8?"]
