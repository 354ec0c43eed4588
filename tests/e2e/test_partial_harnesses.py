"""Harnesses whose samples go on in the next step, with real programs and the real engine; and samples compared."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.e2e.test_partial_conversations import FLAGS, STEPS, start
from tests.support.runs import rows_of, run

pytestmark = pytest.mark.long

@pytest.fixture(scope="module")
def runs(workshop) -> None:
    talks = workshop.environments("talks", [{"environment": "tests.support.e2e_environments:TalksByHarness"}])
    flags = FLAGS | {"langrl_env_config": talks}
    start([workshop.rl("whole", **flags), workshop.rl("halved", **flags, exit_interval=2)], 1)
    start([workshop.rl("halved", **flags, resume=True)], 1)
    start([workshop.rl("tensor", **flags, tensor_model_parallel_size=2), workshop.rl("two", **flags)], 2)


@pytest.mark.parametrize("name", ["whole", "halved", "tensor", "two"])
def test_samples_wait_and_each_is_trained_on_once(workshop, runs, name: str) -> None:
    paths = sorted((workshop.run_dir(name) / "rollouts").glob("step_*.jsonl"))
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    rows = rows_of(workshop.run_dir(name))
    assert Counter(record["step"] for record in found) == dict.fromkeys(range(1, STEPS + 1), 16)
    assert set(Counter(record["task_id"] for record in found).values()) == {4}
    assert all(record["reward"] is not None for record in found)
    assert {row["training/groups_put_aside"] for row in rows} == {4}
    assert {row["training/groups_by_clock"] for row in rows} == {4}
    assert any(record["older"] and record["environment_spans"] for record in found)
    assert max(row["rollout/token_lag_max"] for row in rows) in (1, 2)
    # Tokens of the newest weights have the trainer's log-probs, behind answers that were given again, too.
    assert max(row.get("training/rollout_logprob_gap_max", 0.0) for row in rows) < 1e-5


def test_samples_of_a_harness_are_compared(workshop) -> None:
    """By the environment server, beside the reward of each: a sample has that of its last turn and a point a letter."""
    compared = workshop.environments("compared", [{"environment": "tests.support.e2e_environments:ComparedTalks"}])
    flags = FLAGS | {"rl_partial_rollouts": None, "rl_oversampling": None, "rl_generation_lag": None, "train_iters": 1}
    run(workshop.rl("compared", **flags, langrl_env_config=compared)).check()
    (path,) = (workshop.run_dir("compared") / "rollouts").glob("step_*.jsonl")
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        groups.setdefault(record["task_id"], []).append(record)
    for records in groups.values():
        more = [record["reward"] - record["metrics"]["run_reward"] for record in records]
        assert min(more) == pytest.approx(0.0)
        assert all(each == pytest.approx(round(each)) for each in more)
    assert any(record["reward"] > 1.5 for records in groups.values() for record in records)
