"""Runs with a teacher of another size: what they log, how they go on, and on two ranks as on one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.families.family import SMALL
from tests.support.checkpoints import differences, state_of
from tests.support.hugging_face import write_model
from tests.support.runs import Outcome, rows_of, run_many

ALONE = {"rl_reward_weight": 0, "grpo_group_size": 1, "grpo_prompts_per_step": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": ALONE,
    "mixed": {"rl_teacher_weight": 0.5, "grpo_iterations": 2, "global_batch_size": 8},
    "loss": {"rl_teacher_as": "loss", "rl_teacher_weight": 0.5},
    "kept": ALONE | {"rl_keep_in_rollouts": "teacher"},
}
LAST = Path("checkpoints") / "step_0000004"


@pytest.fixture(scope="module")
def teacher(workshop) -> Path:
    """Larger than the policy."""
    directory = workshop.folder / "teacher"
    write_model(directory, "qwen2", {**SMALL, "vocab_size": 24, "hidden_size": 48, "num_hidden_layers": 4})
    shutil.copytree(workshop.tokenizer, directory, dirs_exist_ok=True)
    return directory


@pytest.fixture(scope="module")
def runs(workshop, warm_start, teacher) -> dict[str, Outcome]:
    """Each whole; mixed with the teacher also stopped half way and resumed, and on two tensor-parallel ranks."""
    every = {"pretrained_checkpoint": warm_start, "train_iters": 4, "rl_teacher_load_hf": teacher}

    def commands(names: dict[str, dict[str, Any]], **more: Any) -> list[list[str]]:
        made = [workshop.rl(name, **{**every, **flags, **more}) for name, flags in names.items()]
        return [[part for text in argv for part in str(text).split()] for argv in made]

    halved = {"halved": VARIANTS["mixed"]}
    found = dict(zip(VARIANTS, run_many(commands(VARIANTS)), strict=True))
    run_many(commands(halved, exit_interval=2))[0].check()
    found["halved"] = run_many(commands(halved, resume=True))[0]
    parallel = {"parallel": VARIANTS["mixed"] | {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
    found["parallel"] = run_many(commands(parallel), 2)[0]
    for outcome in found.values():
        outcome.check()
    return found


def test_the_teacher_alone_makes_every_group_count(runs, workshop):
    for row in rows_of(workshop.run_dir("alone")):
        if row["step"]:
            assert (row["training/signal_share"], row["training/samples_per_update"]) == (1.0, 16.0)
            assert row["teacher/kl"] > 0 > row["teacher/logprob"]
            assert row["actor/grad_norm"] > 0


def test_every_way_trains_otherwise(runs, workshop):
    norms = {name: rows_of(workshop.run_dir(name))[-1]["actor/grad_norm"] for name in ("alone", "mixed", "loss")}
    assert len(set(norms.values())) == 3
    assert all("teacher/loss" in row for row in rows_of(workshop.run_dir("loss")) if row["step"])


def test_where_the_weights_wait_changes_nothing(runs, workshop):
    assert differences(workshop.run_dir("alone") / LAST, workshop.run_dir("kept") / LAST) == []


def test_a_resumed_run_ends_as_if_it_had_not_stopped(runs, workshop, teacher):
    assert differences(workshop.run_dir("mixed") / LAST, workshop.run_dir("halved") / LAST) == []
    recorded = state_of(workshop.run_dir("halved") / LAST)["components"]["teacher"]
    assert recorded["path"] == str(teacher)
    assert set(recorded["weights"]) == {"float32", "bfloat16"}


def test_two_ranks_learn_what_one_does(runs, workshop):
    pairs = zip(rows_of(workshop.run_dir("mixed")), rows_of(workshop.run_dir("parallel")), strict=True)
    for one, two in ((one, two) for one, two in pairs if one["step"]):
        for name in ("teacher/kl", "teacher/logprob", "critic/advantages/max", "actor/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_another_teacher_cannot_take_the_run_over(runs, workshop, warm_start):
    other = workshop.folder / "other"
    write_model(other, "qwen2", {**SMALL, "vocab_size": 24})
    shutil.copytree(workshop.run_dir("halved"), workshop.run_dir("taken_over"))
    flags = VARIANTS["mixed"] | {"pretrained_checkpoint": warm_start, "train_iters": 6, "rl_teacher_load_hf": other}
    (outcome,) = run_many([workshop.rl("taken_over", resume=True, **flags)])
    assert f"the teacher {other} has other weights than the teacher" in outcome.check(1).output
