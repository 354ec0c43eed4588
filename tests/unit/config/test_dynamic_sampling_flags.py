"""Dynamic sampling that would never succeed, or whose settings nobody reads, is refused before a model is built."""

from __future__ import annotations

import pytest

from megatron_rl.config.rl_config import resolve
from megatron_rl.run.preflight import extension_problems


def test_as_many_prompts_are_started_as_are_wanted(config):
    assert resolve(config(rl_dynamic_sampling=True), 1).algorithm.rl_oversampling == 8


@pytest.mark.parametrize(
    ("flag", "value"),
    [("rl_oversampling", "16"), ("rl_max_refills", "3"), ("rl_surplus", "keep"), ("rl_group_filter", "mean_reward")],
)
def test_a_setting_without_it_is_refused(problems, flag, value):
    (problem,) = problems(**{flag: value})
    assert f"--{flag.replace('_', '-')}" in problem
    assert "has no effect without --rl-dynamic-sampling" in problem
    assert problems(**{flag: value}, rl_dynamic_sampling=True) == []


def test_groups_kept_are_a_step_old_and_corrected(config, problems):
    keep = {"rl_dynamic_sampling": True, "rl_surplus": "keep"}
    algorithm = resolve(config(**keep), 1).algorithm
    assert (algorithm.rl_generation_lag, algorithm.rl_correction) == (1.0, "token_tis")
    dropped = resolve(config(rl_dynamic_sampling=True), 1).algorithm
    assert (dropped.rl_generation_lag, dropped.rl_correction) == (None, "none")
    asked = {"rl_generation_lag": "4", "rl_correction": "none"}
    assert problems(**keep, **asked) == []
    algorithm = resolve(config(**keep, **asked), 1).algorithm
    assert (algorithm.rl_generation_lag, algorithm.rl_correction) == (4.0, "none")
    (problem,) = problems(**keep, rl_generation_lag="0")
    assert "--rl-generation-lag 0 with --rl-surplus keep" in problem


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rl_oversampling": "7"}, "--rl-oversampling 7 is less than --grpo-prompts-per-step 8; use 8 or more"),
        ({"rl_keep_zero_variance_groups": True}, "replaces groups of equal rewards by others"),
        ({"grpo_group_size": "1", "rl_advantage": "batch_norm"}, "differs from no other; use 2 or more"),
    ],
)
def test_what_can_never_succeed_is_refused(problems, changes, text):
    (problem,) = problems(rl_dynamic_sampling=True, **changes)
    assert text in problem


def test_options_of_the_filter(config):
    def told(*options):
        asked = config(rl_dynamic_sampling=True, rl_group_filter="mean_reward", rl_group_filter_args=" ".join(options))
        return [problem.text for problem in extension_problems(resolve(asked, 1))[1]]

    assert told("low=0.1", "high=0.9") == []
    assert "low=0.9 is above high=0.8" in told("low=0.9")[0]
    assert "has no option 'lo'; did you mean low?" in told("lo=0.1")[0]
