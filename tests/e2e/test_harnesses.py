"""Harnesses in whole runs: real processes and OpenAI clients, two ranks, faults. Kills: `test_agent_kills`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.support.runs import rows_of, run_many

MODULE = "tests.support.e2e_environments"
SHORT = {
    "rl_max_new_tokens": 6, "train_iters": 2, "rl_log_rollouts": 8, "grpo_prompts_per_step": 4,
    "rl_keep_zero_variance_groups": True,
}  # fmt: skip
FIELDS = (
    "step", "task_id", "sample", "greedy", "prompt_ids", "token_ids", "inference_logprobs", "environment_spans",
    "reward", "advantage", "update",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(workshop) -> dict[str, list[dict[str, Any]]]:
    """The recorded rows of runs on two ranks; the weights are the same as far as the samples are."""
    lists = {
        "turns": {"environment": f"{MODULE}:Talks"},
        "harness": {"environment": f"{MODULE}:TalksByHarness"},
        "faults": {"environment": f"{MODULE}:TalksByHarness", "args": {"faults": True}},
    }
    more: dict[str, dict[str, Any]] = {
        "turns": {"eval_interval": 2, "rl_prompts_per_eval": 2, "rl_samples_per_eval_prompt": 2},
        "harness": {"eval_interval": 2, "rl_prompts_per_eval": 2, "rl_samples_per_eval_prompt": 2},
        "faults": {"train_iters": 1, "rl_max_failed_share": 0.9},
    }
    commands = [
        workshop.rl(name, langrl_env_config=workshop.environments(name, [entry]), **SHORT | more[name])
        for name, entry in lists.items()
    ]
    for outcome in run_many(commands, ranks=2):
        outcome.check()
    return {name: recorded(workshop, name) for name in lists}


def recorded(workshop, name: str) -> list[dict[str, Any]]:
    paths = sorted((workshop.run_dir(name) / "rollouts").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_harness_trains_on_the_tokens_of_the_turns(runs, workshop) -> None:
    """The same draws, rewards, gradients and evaluations, greedy answers too."""
    turns, harness = ([{name: row.get(name) for name in FIELDS} for row in runs[name]] for name in ("turns", "harness"))
    assert len(turns) > 30
    assert max(len(row["environment_spans"]) for row in turns) == 2
    assert harness == turns
    metrics = [rows_of(workshop.run_dir(name)) for name in ("turns", "harness")]
    compared = 0
    for own, other in zip(*metrics, strict=True):
        assert other.get("training/rollout_logprob_gap_max", 0) < 1e-5
        for name in own:
            if name.startswith(("actor/", "critic/", "val/", "response_length/", "rollout/")):
                assert own[name] == other[name], name
                compared += 1
    assert compared > 30


def test_what_goes_wrong_leaves_the_others_as_they_are(runs) -> None:
    """Dead, hanging and raising harnesses are masked, and all other samples have the tokens that they have without."""
    whole = {(row["task_id"], row["sample"]): row for row in runs["turns"] if row["step"] == 1 and "advantage" in row}
    codes = Counter(row["code"] for row in runs["faults"])
    assert codes[""] >= 8 and sum(codes.values()) - codes[""] >= 2, codes
    for row in runs["faults"]:
        expected = whole[row["task_id"], row["sample"]]["token_ids"]
        if row["code"]:
            assert row["code"] in ("worker_died", "timeout", "environment_exception")
            assert row["reward"] is None and row["update"] is None
            assert row["token_ids"] == expected[: len(row["token_ids"])]
        else:
            assert row["token_ids"] == expected
