"""A run in one go equals the same run gone on with from what it saved half way, in every topology: bit for bit.

That a save changes nothing is seen where the run in one go saves only its end: test_stopping.py, test_critic.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import contents, differences, state_of
from tests.support.runs import Outcome, copy_as_of, facts_of, rows_of, run_many

TENSOR_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
KL = {"grpo_kl_beta": 0.05, "global_batch_size": 8, "use_distributed_optimizer": True}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "rl_two_replicas": (2, "rl", {"use_distributed_optimizer": True, "eval_interval": 3, "rl_prompts_per_eval": 2}),
    "supervised_two_replicas": (
        2, "supervised",
        {
            "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
            "hidden_dropout": 0.1,
        },
    ),
    "supervised_two_stages": (2, "supervised", {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "rl_tensor_parallel": (2, "rl", TENSOR_PARALLEL),
    "rl_dynamic_sampling": (
        2, "rl",
        {
            "use_distributed_optimizer": True, "rl_dynamic_sampling": True, "rl_oversampling": 6, "rl_max_refills": 2,
            "rl_truncated": "mask", "bf16": True,
        },
    ),
    "rl_dynamic_tensor_parallel": (2, "rl", TENSOR_PARALLEL | {"rl_dynamic_sampling": True, "rl_oversampling": 6}),
    "rl_context_parallel": (
        2, "rl",
        {
            "context_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True,
            "eval_interval": 3, "rl_prompts_per_eval": 2, **KL,
        },
    ),
    "rl_two_stages": (
        2, "rl",
        {
            "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "eval_interval": 3,
            "rl_prompts_per_eval": 2, "rl_rollout_quantization": "int8_smooth", **KL,
        },
    ),
    "rl_bf16_two_replicas": (
        2, "rl",  # one group: a replica generates nothing
        {
            "use_distributed_optimizer": True, "bf16": True, "grpo_prompts_per_step": 1,
            "rl_keep_zero_variance_groups": True,
        },
    ),
    "rl_one_rank": (
        1, "rl",
        {"grpo_iterations": 2, "global_batch_size": 8, "rl_keep_zero_variance_groups": True, "grpo_kl_beta": 0.05},
    ),
    "rl_bf16_one_rank": (1, "rl", {"bf16": True}),
    "rl_sgd_one_rank": (1, "rl", {"optimizer": "sgd", "weight_decay": 0.1}),
}
"""Name -> ranks, mode, flags. Each takes 4 steps; `rl_one_rank` makes 4 updates in each."""
LONG = {"rl_dynamic_tensor_parallel", "supervised_two_stages", "rl_bf16_two_replicas"}
"""What only ``--long`` runs: dynamic sampling and bf16 are on two replicas, too, and stages in RL and test_pipeline.py.
"""
STOPPED = {2: "rl_two_replicas", 1: "rl_one_rank"}
"""Ranks -> the case of which there is also a run that is told to stop after 2 steps."""


def _commands(workshop, names: list[str], suffix: str, **changes: Any) -> list[list[str]]:
    cases = ((name, *CASES[name][1:]) for name in names)
    return [getattr(workshop, mode)(f"{name}_{suffix}", **flags, **changes) for name, mode, flags in cases]


@pytest.fixture(scope="module", params=[2, 1], ids=["two_ranks", "one_rank"])
def runs(request, workshop, with_long) -> tuple[int, list[str]]:
    """Whole runs in one process a rank, and in fresh ones their second halves again, from what was saved on the way."""
    ranks = request.param
    left_out = set() if with_long else LONG
    names = [name for name, (wanted, _, _) in CASES.items() if wanted == ranks and name not in left_out]
    stopped = workshop.rl(f"stopped_{ranks}", **CASES[STOPPED[ranks]][2], exit_interval=2)
    for outcome in run_many([*_commands(workshop, names, "whole", save_interval=2), stopped], ranks):
        outcome.check()
    for name in names:
        copy_as_of(2, workshop.run_dir(f"{name}_whole"), workshop.run_dir(f"{name}_halved"))
    for outcome in run_many(_commands(workshop, names, "halved", save_interval=2, resume=True), ranks):
        assert "(step 2)" in outcome.check().output
    return ranks, names


def test_a_run_that_is_told_to_stop_saves_what_a_longer_one_does(runs, workshop):
    whole, stopped = workshop.run_dir(f"{STOPPED[runs[0]]}_whole"), workshop.run_dir(f"stopped_{runs[0]}")
    assert facts_of(stopped)["status"] == "stopped"
    saved = Path("checkpoints") / "step_0000002"
    assert differences(stopped / saved, whole / saved) == []


def test_a_resumed_run_ends_as_if_it_had_not_stopped(runs, workshop):
    for name in runs[1]:
        whole, halved = workshop.run_dir(f"{name}_whole"), workshop.run_dir(f"{name}_halved")
        assert facts_of(halved)["status"] == "finished"
        last = Path("checkpoints") / "step_0000004"
        assert differences(whole / last, halved / last) == [], name
        names = contents(whole / last)
        moments = "momentum_buffer" if "sgd" in name else "exp_avg"
        assert any(moments in key for key in names), f"{name}: the optimizer's moments were not compared"
        assert "sgd" in name or any("step" in key for key in names), f"{name}: the step counters were not compared"


def test_saved_weights_are_those_of_the_last_update(runs, workshop):
    """The distributed optimizer keeps fp32 copies; with overlapping communication the model's may lag behind."""
    for name in (name for name in runs[1] if CASES[name][2].get("use_distributed_optimizer")):
        saved = contents(workshop.run_dir(f"{name}_halved") / "checkpoints" / "step_0000002")
        prefix = "optimizer.state.param."
        masters = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
        assert masters, name
        for key, value in masters.items():
            assert torch.equal(saved[key], value.to(saved[key].dtype)), f"{name}: {key}"


def test_a_resumed_run_logs_the_same_rows(runs, workshop):
    for name in runs[1]:
        rows = rows_of(workshop.run_dir(f"{name}_halved"))
        assert rows == rows_of(workshop.run_dir(f"{name}_whole")), name
        assert [row["step"] for row in rows if row["step"]] == [1, 2, 3, 4]
        assert rows[-1]["actor/lr"] < rows[-2]["actor/lr"], "the schedule stands still"


def test_a_resumed_run_keeps_the_same_rollouts(runs, workshop):
    for name in (name for name in runs[1] if CASES[name][1] == "rl"):
        for step in (1, 2, 3, 4):
            record = Path("rollouts") / f"step_{step:06d}.jsonl"
            whole, halved = (workshop.run_dir(f"{name}_{kind}") / record for kind in ("whole", "halved"))
            assert whole.read_text() == halved.read_text(), f"{name}, step {step}"
            assert whole.read_text().count("\n") >= 2


MOVES = {
    "tensor_parallel_to_replicas": ("rl_tensor_parallel", 2, {}),
    "replicas_to_tensor_parallel": ("rl_two_replicas", 2, {**TENSOR_PARALLEL, "use_distributed_optimizer": True}),
    "context_parallel_to_replicas": ("rl_context_parallel", 2, KL),
    "context_parallel_to_tensor_parallel": ("rl_context_parallel", 2, {**KL, **TENSOR_PARALLEL}),
    "context_parallel_to_one_rank": ("rl_context_parallel", 1, KL),
    "replicas_to_one_rank": ("rl_two_replicas", 1, {"use_distributed_optimizer": True}),
    "tensor_parallel_to_one_rank": ("rl_tensor_parallel", 1, {}),
}
"""Name -> the run whose first half is continued, ranks, flags."""


@pytest.fixture(scope="module")
def moved(workshop, runs) -> dict[str, Outcome]:
    """The same first halves continued by other numbers of ranks; the fixture runs once for each number."""
    ranks = runs[0]
    chosen = {name: move for name, move in MOVES.items() if move[1] == ranks}
    for name, (origin, _, _) in chosen.items():
        copy_as_of(2, workshop.run_dir(f"{origin}_whole"), workshop.run_dir(name))
    commands = [workshop.rl(name, resume=True, **flags) for name, (_, _, flags) in chosen.items()]
    return dict(zip(chosen, run_many(commands, ranks), strict=True))


def test_a_run_goes_on_in_another_topology(moved, workshop):
    for name, outcome in moved.items():
        outcome.check()
        origin = MOVES[name][0]
        whole, own = workshop.run_dir(f"{origin}_whole"), workshop.run_dir(name)
        last = Path("checkpoints") / "step_0000004"
        assert _cursor(own / last) == _cursor(whole / last)
        for step in (3, 4):
            drawn, expected = _prompts(own, step), _prompts(whole, step)
            assert drawn, name
            assert drawn <= expected or expected <= drawn, f"{name}: other prompts in step {step}"
        for ours, theirs in zip(rows_of(own)[-2:], rows_of(whole)[-2:], strict=True):
            for metric in ("critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm"):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-3, abs=1e-5), f"{name}: {metric}"
            assert ours["actor/lr"] == theirs["actor/lr"]


def _cursor(checkpoint: Path) -> dict[str, int]:
    return state_of(checkpoint)["components"]["prompts"]


def _prompts(run_dir: Path, step: int) -> set[str]:
    """Prompts in rank 0's records: all draws on one rank, its share of them with two replicas."""
    lines = (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["prompt"] for line in lines}
