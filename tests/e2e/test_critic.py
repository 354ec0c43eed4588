"""Runs with a critic: stopped and resumed they end the same to the bit, and another number of ranks goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checkpoint.stored import open_weights
from tests.support.checkpoints import contents, differences, state_of
from tests.support.runs import Outcome, facts_of, rows_of, run_many

FLAGS: dict[str, Any] = {
    "rl_advantage": "gae", "grpo_group_size": 1, "grpo_prompts_per_step": 16, "global_batch_size": 8,
    "rl_critic_warmup_steps": 1, "rl_critic_lr": 2e-2, "grpo_kl_beta": 0.05, "rl_kl_in_reward": True,
    "use_distributed_optimizer": True, "rl_offload_optimizer_during_inference": True,
}  # fmt: skip
ON_BASE: dict[str, Any] = FLAGS | {
    "lora_rank": 4, "rl_critic_lora_rank": 2, "tensor_model_parallel_size": 2, "rl_rollout_quantization": "int8",
}  # fmt: skip
"""The critic is adapters and a head on the policy's base."""
LAST = Path("checkpoints") / "step_0000004"
OTHERS = {"one_rank": (1, {}), "tensor_parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True})}


@pytest.fixture(scope="module")
def runs(workshop) -> None:
    """A whole run on two ranks, and one in two halves."""
    first = [workshop.rl("whole", **FLAGS), workshop.rl("halved", **FLAGS, exit_interval=2)]
    first += [workshop.rl("on_base", **ON_BASE), workshop.rl("on_base_halved", **ON_BASE, exit_interval=2)]
    for outcome in run_many(first, 2):
        outcome.check()
    assert facts_of(workshop.run_dir("halved"))["status"] == "stopped"
    for name in OTHERS:
        shutil.copytree(workshop.run_dir("halved"), workshop.run_dir(name))
    on_base = workshop.rl("on_base_halved", **ON_BASE, exit_interval=2, resume=True)
    for outcome in run_many([workshop.rl("halved", **FLAGS, exit_interval=2, resume=True), on_base], 2):
        assert "(step 2)" in outcome.check().output


@pytest.fixture(
    scope="module",
    # tests/distributed/test_critic_layouts.py has tensor-parallel ranks
    params=["one_rank", pytest.param("tensor_parallel", marks=pytest.mark.long)],
)
def other(request, runs, workshop) -> tuple[str, Outcome]:
    """The first half continued in another topology."""
    ranks, flags = OTHERS[request.param]
    (outcome,) = run_many([workshop.rl(request.param, **FLAGS | flags, resume=True)], ranks)
    return request.param, outcome


def test_a_resumed_run_ends_as_if_it_had_not_stopped(runs, workshop):
    whole, halved = workshop.run_dir("whole"), workshop.run_dir("halved")
    assert differences(whole / LAST, halved / LAST) == []
    assert rows_of(halved) == rows_of(whole)
    names = contents(whole / LAST)
    for wanted in ("critic.output_layer.weight", "critic.optimizer.state.exp_avg.output_layer.weight"):
        assert wanted in names, sorted(name for name in names if "critic" in name)


def test_one_on_the_policys_base_goes_on_to_the_bit(runs, workshop):
    """Its checkpoint has adapters and a head, and no weight of the base."""
    whole, halved = workshop.run_dir("on_base"), workshop.run_dir("on_base_halved")
    assert differences(whole / LAST, halved / LAST) == []
    assert rows_of(halved) == rows_of(whole)
    critics = {name for name in contents(whole / LAST) if name.startswith("critic.") and ".optimizer." not in name}
    assert "critic.output_layer.weight" in critics
    assert all(".adapter." in name or name == "critic.output_layer.weight" for name in critics), sorted(critics)
    assert all(row["critic/grad_norm"] > 0 for row in rows_of(whole) if row["step"])
    other = ON_BASE | {"rl_critic_lora_rank": 3, "load": whole / "checkpoints"}
    (refused,) = run_many([workshop.rl("other_rank", **other)], 2)
    text = "has a critic of --rl-critic-lora-rank 2, this run has one of --rl-critic-lora-rank 3; use the same"
    assert text in refused.check(2).output


def test_the_first_step_trains_the_critic_alone(runs, workshop):
    rows = [row for row in rows_of(workshop.run_dir("whole")) if row["step"]]
    assert [row["training/updates"] for row in rows] == [0, 2, 2, 2]
    assert "actor/grad_norm" not in rows[0]
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    progress = state_of(workshop.run_dir("whole") / LAST)["components"]["progress"]
    assert (progress["updates"], progress["critic_updates"]) == (6, 8)
    rates = [row["critic/lr"] / row["actor/lr"] for row in rows[1:]]
    assert rates == pytest.approx([2.0] * 3)


def test_another_topology_goes_on(other, workshop):
    name, outcome = other
    outcome.check()
    for ours, theirs in zip(rows_of(workshop.run_dir(name))[-2:], rows_of(workshop.run_dir("whole"))[-2:], strict=True):
        for metric in (
            "critic/rewards/mean", "actor/grad_norm", "critic/vf_loss", "critic/values/mean", "critic/grad_norm",
            "critic/vf_explained_var", "actor/reward_kl_penalty",
        ):  # fmt: skip
            assert ours[metric] == pytest.approx(theirs[metric], rel=2e-3, abs=1e-5), metric


def test_an_export_finds_the_policys_weights_alone(runs, workshop):
    names = open_weights(workshop.run_dir("whole") / LAST).names
    assert "output_layer.weight" in names
    assert not [name for name in names if name.startswith("critic.")]


def test_who_knows_of_no_critic_takes_the_policy(runs, workshop):
    """And a run that has one is not continued from a checkpoint without."""
    plain = workshop.rl("plain", pretrained_checkpoint=workshop.run_dir("whole") / LAST, train_iters=1)
    (outcome,) = run_many([plain])
    outcome.check()
    (refused,) = run_many([workshop.rl("refused", **FLAGS, load=workshop.run_dir("plain") / "checkpoints")])
    assert "is of a run without a critic; start a new run from its weights" in refused.check(2).output
