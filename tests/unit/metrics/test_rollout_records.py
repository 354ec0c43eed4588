"""Rollout records come back as they were written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.metrics.rollouts import gold_answer, rows_by_group, training_rows
from megatron_rl.types import Completion, Grade, Rollout, RolloutGroup, SourcedTask, Task
from tests.support.records import write_rollouts
from tests.support.rollouts import drawn, group_of, sample_of

VOCABULARY = {1: "<bos>", 2: "2+2=", 5: "4", 6: "<eos>"}


def spelled(ids: Sequence[int]) -> str:
    return "".join(map(VOCABULARY.__getitem__, ids))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_group(task: str, *grades: Grade) -> RolloutGroup:
    completion = Completion((5, 6), (-0.25, float("-inf")), "stop", policy_version=11)
    rollouts = tuple(Rollout(completion, "4 \ud800", grade) for grade in grades)
    return RolloutGroup(SourcedTask("arithmetic", Task(task, "2+2", {"gold": "4"})), (1, 2), rollouts)


GROUPS = [
    make_group("a", Grade(1.0, {"length": 2.0}, correct=True), Grade(None, code="timeout", message="slow")),
    make_group("b", Grade(0.0)),
]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000012.jsonl"
    write_rollouts(path, 12, GROUPS)
    first, second, third = _rows(path)
    assert first == {
        "step": 12,
        "environment": "arithmetic",
        "task_id": "a",
        "sample": 0,
        "branch": 0,
        "prompt": "[1][2]",
        "prompt_ids": [1, 2],
        "gold": "4",
        "completion": "4 \ud800",
        "token_ids": [5, 6],
        "inference_logprobs": [-0.25, None],
        "finish_reason": "stop",
        "policy_version": 11,
        "older": [],
        "reward": 1.0,
        "status": "ok",
        "code": "",
        "verdict": "",
        "correct": True,
        "extracted": None,
        "environment_spans": [],
        "turn_rewards": [],
        "message": "",
        "metrics": {"length": 2.0},
        "token_texts": ["[5]", "[6]"],
    }
    assert (second["reward"], second["status"], second["code"], second["sample"]) == (
        None,
        "error",
        "timeout",
        1,
    )
    assert third["task_id"] == "b"


def test_token_texts_are_decoded_once_per_id(tmp_path: Path) -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.extend(ids)
        return spelled(ids)

    write_rollouts(tmp_path / "rows.jsonl", 1, GROUPS[1:], decode_raw=decode)
    assert _rows(tmp_path / "rows.jsonl")[0]["token_texts"] == ["4", "<eos>"]
    assert decoded == [1, 2, 5, 6]


def test_rows_of_training_say_what_became_of_each_sample() -> None:
    """Groups 1 and 3 of two samples each are this rank's: samples 2, 3 and 6, 7 of the step."""
    grade = Grade(1.0)
    groups = [make_group("a", grade, grade), make_group("b", grade, grade)]
    use = {(0, 0): (0, 1.5), (2, 0): (1, 0.5), (3, 0): (0, -0.5), (6, 0): (1, 2.0), (7, 1): (1, 9.0)}
    rows = training_rows(12, groups, [1, 3], use, 4, spelled)
    assert [(row["group"], row["sample"], row["advantage"], row["update"]) for row in rows] == [
        (1, 0, 0.5, 1), (1, 1, -0.5, 0), (3, 0, 2.0, 1), (3, 1, None, None),
    ]  # fmt: skip
    assert {row["group"] for row in training_rows(12, groups, [1, 3], use, 3, spelled)} == {1}


def test_a_sample_of_several_sequences_has_a_row_each() -> None:
    """A branch behind the first answer token; one that shares more with that branch than with the first; one anew."""
    tree = sample_of(
        1.0, ([1, 2], drawn([5, 6])), ([1, 2, 5, 4], drawn([6])), ([1, 2, 5, 4, 6, 3], drawn([5, 6])), ([8], drawn([5]))
    )
    group = group_of(tree, sample_of(0.0, ([1, 2], drawn([6]))), prompt_ids=(1, 2))
    use = {(2, 0): (0, 0.5), (2, 1): (0, 0.25), (2, 3): (0, 0.125), (3, 0): (1, -0.5)}
    rows = training_rows(7, [group], [1], use, 9, str)
    assert [(row["sample"], row["branch"], row["advantage"], row["update"]) for row in rows] == [
        (0, 0, 0.5, 0), (0, 1, 0.25, 0), (0, 2, None, None), (0, 3, 0.125, 0), (1, 0, -0.5, 1),
    ]  # fmt: skip
    first, second, third, fourth, other = rows
    assert "branch_of" not in first and "read" not in other
    assert (second["prompt"], second["prompt_ids"], second["token_ids"]) == ("(1, 2, 5, 4)", [1, 2, 5, 4], [6])
    assert [(row["branch_of"], row["shared_tokens"], row["read"]) for row in (second, third, fourth)] == [
        (0, 3, "(4,)"), (1, 5, "(3,)"), (0, 0, "(8,)"),
    ]  # fmt: skip
    assert {row["reward"] for row in rows[:4]} == {1.0}


def test_the_gold_answer_is_what_the_grader_is_given() -> None:
    assert gold_answer(Task("a", "2+2", {"gold": "4", "answer": "no"})) == "4"
    assert gold_answer(Task("a", "2+2", {"answer": 4})) == "4"
    assert gold_answer(Task("a", "2+2", {"gold": [1, 2]})) == "[1, 2]"
    assert gold_answer(Task("a", "2+2")) is None


def test_what_is_correct_is_recorded_as_evaluations_count_it() -> None:
    """Nothing where nobody can tell, or the grade failed."""
    grades = [Grade(0.5, correct=False), Grade(0.5, correct=True), Grade(0.5), Grade(None, code="timeout")]
    [rows] = rows_by_group(1, [make_group("a", *grades)], spelled)
    assert [row["correct"] for row in rows] == [False, True, None, None]


def test_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    write_rollouts(path, 1, GROUPS)

    def fail(source: Path, target: Path) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_rollouts(path, 2, GROUPS)
    assert [row["step"] for row in _rows(path)] == [1, 1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
