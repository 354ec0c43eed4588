"""Rewards of what lies around the answer: its length, and the thought before it."""

from __future__ import annotations

import json

import pytest

from megatron_rl.environments.data import AFTER, BEFORE
from megatron_rl.environments.loader import find_environment
from megatron_rl.errors import ConfigError
from megatron_rl.types import Transcript


def overlong(folder, **options):
    """DAPO on one problem, with these options, and its task."""
    row = {"prompt": [{"role": "user", "content": f"{BEFORE}17+17?{AFTER}"}], "reward_model": {"ground_truth": "34"}}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    environment = find_environment("dapo").from_options({"path": str(folder / "rows.jsonl"), "held_out": 0, **options})
    return environment, next(iter(environment.tasks("train")))


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (17, -1.0)],  # L_max 16, L_cache 4
)
def test_long_answers_are_punished_and_stay_right(tmp_path, tokens, penalty):
    environment, task = overlong(tmp_path, overlong_buffer=4, max_response_tokens=16)
    right = environment.grade(task, Transcript("Answer: 34", "length", tokens))
    wrong = environment.grade(task, Transcript("Answer: 35", "length", tokens))
    assert (right.reward, wrong.reward) == (1.0 + penalty, -1.0 + penalty)
    assert (right.status, right.metrics["correct"]) == ("correct", 1.0)
    assert (wrong.status, wrong.metrics["correct"]) == ("wrong", 0.0)
    assert right.metrics["overlong_penalty"] == wrong.metrics["overlong_penalty"] == penalty


def test_the_punishment_has_a_factor_and_is_off_by_default(tmp_path):
    options = {"overlong_buffer": 4, "max_response_tokens": 16, "overlong_penalty": 0.5}
    environment, task = overlong(tmp_path, **options)
    assert environment.grade(task, Transcript("Answer: 34", "stop", 14)).reward == 0.75
    environment, task = overlong(tmp_path, max_response_tokens=16)
    plain = environment.grade(task, Transcript("Answer: 34", "stop", 16))
    assert plain.reward == 1.0
    assert "overlong_penalty" not in plain.metrics


def test_a_length_punishment_needs_training():
    with pytest.raises(ConfigError, match="overlong_buffer is for training, and aime is only evaluated") as raised:
        find_environment("aime").from_options({"overlong_buffer": 4, "max_response_tokens": 16})
    assert len(raised.value.lines) == 1
    trained = find_environment("gsm8k").from_options({"overlong_buffer": 4, "max_response_tokens": 16})
    assert trained.overlong.free_tokens == 12


@pytest.mark.parametrize("grader", ["dapo", "math", "deepscaler"])
def test_a_thinking_model_answers_after_its_thought(tmp_path, grader):
    environment, task = overlong(tmp_path, thinking=True, grader=grader)
    right = environment.gold_answer(task)
    assert "</think>" in right
    for text, reward in [
        (right, 1.0),
        (f"<think>Answer: 35 \\boxed{{35}}{right}", 1.0),
        (right.replace("</think>", ""), -1.0),  # cut while it thought, or it did not think
        (f"{right}</think> hm", -1.0),
    ]:
        assert environment.grade(task, Transcript(text, "stop", len(text))).reward == reward, text
    unthinking, task = overlong(tmp_path, grader=grader)
    counts = grader != "deepscaler"
    assert (unthinking.grade(task, Transcript("Answer: \\boxed{34}", "stop", 18)).reward > 0) == counts
