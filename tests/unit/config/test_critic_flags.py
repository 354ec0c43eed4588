"""Flags of a critic: what nobody would read, and what it cannot be, is refused before a model is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.rl_config import resolve
from megatron_rl.config.training import critic_config
from megatron_rl.run.preflight import extension_problems
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("rl_critic_lr", "1e-5"), ("rl_critic_clip_range", "0.2"), ("rl_critic_warmup_steps", "3"),
        ("rl_critic_load_hf", "somewhere"), ("rl_kl_in_reward", True),
    ],
)  # fmt: skip
def test_a_setting_without_a_critic_is_refused(problems, flag, value):
    (problem,) = problems(**{flag: value}, grpo_kl_beta="0.1")
    assert f"--{flag.replace('_', '-')}" in problem
    assert "has no effect without a critic; add --rl-advantage gae" in problem
    assert problems(**{flag: value}, grpo_kl_beta="0.1", rl_advantage="gae") == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rl_critic_warmup_steps": "10", "train_iters": "10"}, "leaves no step of 10 that trains the policy; use at"),
        ({"rl_teacher_load_hf": "somewhere"}, "--rl-teacher-load-hf somewhere with a critic is not built; use one of"),
        ({"rl_kl_in_reward": True}, "has no effect with --grpo-kl-beta 0"),
        ({"rl_kl_in_reward": True, "grpo_kl_beta": "0.1", "rl_kl_estimator": "k2"}, "the reward takes k1; leave"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(problems, changes, text):
    (problem,) = problems(rl_advantage="gae", **changes)
    assert text in problem


@pytest.mark.parametrize(("flag", "value"), [("rl_gae_lambda", "1.5"), ("rl_gamma", "-1")])
def test_outside_0_to_1(flag, value):
    with pytest.raises(AssertionError, match=f"--{flag.replace('_', '-')} must be at"):
        tiny_config(rl_advantage="gae", **{flag: value})


def test_options_of_the_advantage(config):
    def told(**flags):
        return [problem.text for problem in extension_problems(resolve(config(**flags), 1))[1]]

    assert told(rl_advantage="gae", rl_gae_lambda="0.95", rl_gamma="0.9") == []
    assert "grpo has no option 'gae_lambda' and would ignore --rl-gae-lambda; use gae" in told(rl_gae_lambda="0.95")[0]
    both = told(rl_advantage="gae", rl_gae_lambda="0.95", rl_advantage_args="length_alpha=0.05")
    assert "leave one of them out" in both[0]


def test_a_group_may_be_of_one_sample(problems):
    assert problems(rl_advantage="gae", grpo_group_size="1") == []
    assert "use 2 or more" in problems(grpo_group_size="1")[0]


def test_an_advantage_of_ones_own_may_want_a_critic(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text('class Advantage:\n    BASELINE = "critic"\n')
    assert tiny_config(rl_advantage=f"{path}:Advantage").wants_critic
    assert not tiny_config().wants_critic
    assert not tiny_config(rl_advantage="gae", perform_rl_step=False, global_batch_size=4).wants_critic


def test_the_schedule_of_the_critic_is_the_policys_scaled():
    config = tiny_config(rl_advantage="gae", lr=1e-2, min_lr=2e-3, lr_warmup_init=1e-3, rl_critic_lr=5e-2)
    own = critic_config(config)
    rates = own.optimizer.lr, own.schedule.min_lr, own.schedule.lr_warmup_init
    assert rates == pytest.approx((5e-2, 1e-2, 5e-3))
    assert tiny_config(rl_advantage="gae", lr=1e-2).critic.rl_critic_lr == 1e-2


@pytest.mark.parametrize("name", ["gdpo", "maxrl"])
def test_an_advantage_of_whole_samples_is_not_of_turns(problems, name):
    (problem,) = problems(rl_advantage=name, rl_turn_discount="0.5")
    assert f"--rl-turn-discount 0.5 with --rl-advantage {name}, which is defined for" in problem
    assert problems(rl_advantage="gae", rl_turn_discount="1") == []
