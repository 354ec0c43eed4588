"""Runs whose steps begin before all groups are generated: who is trained on, how old it is, and that it repeats."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.support.runs import rows_of, run_many

STEPS = 6
PARTIAL: dict[str, Any] = {
    "train_iters": STEPS, "rl_partial_rollouts": True, "rl_oversampling": 8, "rl_generation_lag": 2,
    "rl_max_new_tokens": 40, "rl_log_rollouts": 100, "rl_keep_zero_variance_groups": True,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "finish": {},
    "again": {},
    "fifo": {"rl_oversampling": 12},
    "drop": {"rl_stale_samples": "drop", "rl_generation_lag": 1, "rl_oversampling": 12},
    "dynamic": {"rl_dynamic_sampling": True, "rl_keep_zero_variance_groups": None},
    "pages": {"attention_backend": "paged", "inference_max_batch_size": 20},
}


OF_TWO_RANKS: dict[str, dict[str, Any]] = {
    "replicas": {"use_distributed_optimizer": True},
    "dynamic_replicas": {
        "use_distributed_optimizer": True, "rl_dynamic_sampling": True, "rl_keep_zero_variance_groups": None,
    },
    "tensor": {"tensor_model_parallel_size": 2},
    "stages": {"pipeline_model_parallel_size": 2},
    "experts": {
        "expert_model_parallel_size": 2, "num_experts": 4, "moe_ffn_hidden_size": 24, "add_qkv_bias": None,
        "pretrained_checkpoint": None, "rl_router_replay": True,
    },
}  # fmt: skip
LONG = {"replicas"}
"""Replicas that sample dynamically, or share experts, are two as well."""


@pytest.fixture(scope="module")
def one_replica(workshop, warm_start) -> None:
    complete(workshop, warm_start, RUNS, ranks=1)


@pytest.fixture(scope="module")
def two_ranks(with_long, workshop, warm_start) -> None:
    left_out = set() if with_long else LONG
    chosen = {name: flags for name, flags in OF_TWO_RANKS.items() if name not in left_out}
    complete(workshop, warm_start, chosen, ranks=2)


def complete(workshop, warm_start, runs: dict[str, dict[str, Any]], ranks: int) -> None:
    commands = [
        workshop.rl(name, **{"pretrained_checkpoint": warm_start} | PARTIAL | flags) for name, flags in runs.items()
    ]
    argvs = [[part for text in argv for part in text.split()] for argv in commands]
    for outcome in run_many(argvs, ranks, timeout=900):
        outcome.check()


def drawn(workshop, name: str) -> list[tuple[int, dict[str, Any]]]:
    """Step and record of every sample."""
    paths = sorted((workshop.run_dir(name) / "rollouts").glob("step_*.jsonl"))
    return [(record["step"], record) for path in paths for record in map(json.loads, path.read_text().splitlines())]


def lags(step: int, record: dict[str, Any]) -> list[int]:
    """Of each token; every step makes an update, so step n begins with version n - 1."""
    found: list[int] = []
    for version, end in [*record["older"], (record["policy_version"], len(record["token_ids"]))]:
        found += [step - 1 - version] * (end - len(found))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_step_has_its_groups_and_none_twice(workshop, one_replica, name):
    found = drawn(workshop, name)
    assert Counter(step for step, _ in found) == dict.fromkeys(range(1, STEPS + 1), 16)
    if name not in ("drop", "dynamic"):  # which begin more than there are tasks
        assert set(Counter(record["task_id"] for _, record in found).values()) == {4}


@pytest.mark.parametrize(("name", "bound"), [("finish", 2), ("fifo", 2), ("drop", 1), ("dynamic", 2), ("pages", 2)])
def test_tokens_are_as_old_as_they_may_be(workshop, one_replica, name, bound):
    rows = rows_of(workshop.run_dir(name))
    for step, row in enumerate(rows, start=1):
        ages = [age for at, record in drawn(workshop, name) if at == step for age in lags(step, record)]
        assert min(ages) >= 0
        assert row["rollout/token_lag_max"] == max(ages)
        assert row["rollout/stale_token_share"] == pytest.approx(sum(age > 0 for age in ages) / len(ages))
    assert 1 <= max(row["rollout/token_lag_max"] for row in rows) <= bound
    mixed = [record for _, record in drawn(workshop, name) if record["older"]]
    assert mixed, "no sample went on with other weights"


def test_engine_and_trainer_agree_on_new_tokens_and_older_ones_are_weighed(workshop, one_replica):
    """Keys and values of the newer weights: with those of the older ones the first would fail."""
    rows = rows_of(workshop.run_dir("finish"))
    assert max(row.get("training/rollout_logprob_gap_max", 0.0) for row in rows) < 1e-5
    assert rows[0]["rollout_corr/abs_log_ratio_mean"] < 1e-5
    assert max(row["rollout_corr/abs_log_ratio_mean"] for row in rows) > 1e-3
    assert max(abs(row["rollout_corr/rollout_is_mean"] - 1) for row in rows) > 1e-3


def test_the_same_command_is_the_same_run(workshop, one_replica):
    assert rows_of(workshop.run_dir("again")) == rows_of(workshop.run_dir("finish"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else []) for name in OF_TWO_RANKS]
)
def test_on_two_ranks(workshop, two_ranks, name):
    """Replicas stop each by itself, running experts on for the others; the ranks of a model copy stop at one step."""
    found, rows = drawn(workshop, name), rows_of(workshop.run_dir(name))
    assert Counter(step for step, _ in found) == dict.fromkeys(range(1, STEPS + 1), 16)
    assert set(Counter(record["task_id"] for _, record in found).values()) == {4}
    assert max(lag for step, record in found for lag in lags(step, record)) in (1, 2)
    if name != "dynamic_replicas":
        assert {row["training/groups_put_aside"] for row in rows} == {4}
    assert max(row.get("training/rollout_logprob_gap_max", 0.0) for row in rows) < 1e-5


@pytest.mark.parametrize("name", ["dynamic", "dynamic_replicas"])
def test_with_dynamic_sampling_rewards_differ_and_every_prompt_is_accounted_for(workshop, one_replica, two_ranks, name):
    rewards: dict[tuple[int, str], set[float]] = {}
    for step, record in drawn(workshop, name):
        rewards.setdefault((step, record["task_id"]), set()).add(record["reward"])
    assert all(len(found) > 1 for found in rewards.values())
    started = answered = 0
    rows = rows_of(workshop.run_dir(name))
    for row in rows:
        started, answered = started + row["training/groups_started"], answered + row["training/groups_answered"]
        assert started == answered + row["training/groups_put_aside"]
        assert row["training/counting_share"] * row["training/groups_answered"] == pytest.approx(4)
    assert sum(row["training/refills"] for row in rows) > 0


def test_tensor_parallel_ranks_take_the_groups_of_one_rank(workshop, one_replica, two_ranks):
    for ours, theirs in zip(*(rows_of(workshop.run_dir(name)) for name in ("tensor", "finish")), strict=True):
        for name in ("actor/grad_norm", "rollout/stale_token_share", "response_length/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name


def test_what_is_in_flight_is_counted(workshop, one_replica):
    for name, at_once in (("finish", 8), ("fifo", 12)):
        rows = rows_of(workshop.run_dir(name))
        assert [row["training/groups_started"] for row in rows] == [at_once] + [4] * (STEPS - 1)
        assert {row["training/groups_put_aside"] for row in rows} == {at_once - 4}
        assert {row["training/groups_dropped"] for row in rows} == {0}
    rows = rows_of(workshop.run_dir("drop"))
    assert sum(row["training/groups_dropped"] for row in rows) > 0
    assert sum(row["training/tokens_dropped"] for row in rows) > 0
    before = rows[0]
    for row in rows[1:]:
        kept = before["training/groups_put_aside"] - row["training/groups_dropped"]
        assert row["training/groups_started"] == 12 - kept
        before = row
