"""Conversations that go on in the next step with the real engine: stopped and resumed, and on tensor-parallel ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import differences
from tests.support.runs import rows_of, run_many

pytestmark = pytest.mark.long

STEPS = 4
FLAGS: dict[str, Any] = {
    "train_iters": STEPS, "rl_partial_rollouts": True, "rl_oversampling": 8, "rl_generation_lag": 2,
    "rl_max_new_tokens": 12, "rl_log_rollouts": 100, "rl_keep_zero_variance_groups": True, "save_interval": 2,
    "seq_length": 96, "rl_turn_discount": 0.9,
}  # fmt: skip
LAST = Path("checkpoints") / f"step_{STEPS:07d}"


def start(commands: list[list[str]], ranks: int) -> None:
    for outcome in run_many([[part for text in argv for part in text.split()] for argv in commands], ranks):
        outcome.check()


@pytest.fixture(scope="module")
def runs(workshop) -> None:
    talks = workshop.environments("talks", [{"environment": "tests.support.e2e_environments:Talks"}])
    flags = FLAGS | {"langrl_env_config": talks}
    start([workshop.rl("whole", **flags), workshop.rl("halved", **flags, exit_interval=2)], 1)
    start([workshop.rl("halved", **flags, resume=True)], 1)
    start([workshop.rl("tensor", **flags, tensor_model_parallel_size=2)], 2)


def records(workshop, name: str) -> list[dict[str, Any]]:
    paths = sorted((workshop.run_dir(name) / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["whole", "tensor"])
def test_conversations_wait_behind_their_first_turn(workshop, runs, name):
    found, rows = records(workshop, name), rows_of(workshop.run_dir(name))
    assert Counter(record["step"] for record in found) == dict.fromkeys(range(1, STEPS + 1), 16)
    assert set(Counter(record["task_id"] for record in found).values()) == {4}
    assert {row["training/groups_put_aside"] for row in rows} == {4}
    assert any(record["older"] and record["environment_spans"] for record in found)
    assert max(row["rollout/token_lag_max"] for row in rows) in (1, 2)
    # New tokens have the trainer's log-probs, behind replies and older turns, too.
    assert max(row.get("training/rollout_logprob_gap_max", 0.0) for row in rows) < 1e-5


def test_a_resumed_run_ends_the_same_to_the_bit(workshop, runs):
    whole, halved = workshop.run_dir("whole"), workshop.run_dir("halved")
    assert differences(whole / LAST, halved / LAST) == []
    assert rows_of(halved) == rows_of(whole)
