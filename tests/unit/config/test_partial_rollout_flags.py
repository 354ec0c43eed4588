"""Partial rollouts: what they take for granted, and what is refused before a model is built."""

from __future__ import annotations

import pytest

from megatron_rl.config.rl_config import resolve

ON = {"rl_partial_rollouts": True}
DYNAMIC = {"rl_dynamic_sampling": True}


def test_what_is_taken_without_a_flag(config):
    plain, partial = resolve(config(), 1).algorithm, resolve(config(**ON), 1).algorithm
    assert (plain.rl_oversampling, plain.rl_generation_lag, plain.rl_correction) == (8, None, "none")
    assert (partial.rl_oversampling, partial.rl_generation_lag, partial.rl_correction) == (16, 3.0, "token_tis")
    assert partial.rl_stale_samples == "finish"
    dynamic = resolve(config(**ON, **DYNAMIC), 1).algorithm
    assert (dynamic.rl_oversampling, dynamic.rl_generation_lag, dynamic.rl_correction) == (16, 3.0, "token_tis")


def test_what_is_typed_wins(config, problems):
    asked = {"rl_generation_lag": "2.5", "rl_oversampling": "24", "rl_correction": "none"}
    assert problems(**ON, **asked) == []
    algorithm = resolve(config(**ON, **asked), 1).algorithm
    assert (algorithm.rl_oversampling, algorithm.rl_generation_lag, algorithm.rl_correction) == (24, 2.5, "none")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rl_generation_lag": "0"}, "--rl-generation-lag 0 with --rl-partial-rollouts: what is left"),
        ({"rl_generation_lag": "0.5"}, "use 1 or more"),
        ({"rl_oversampling": "8"}, "is not more than --grpo-prompts-per-step 8; use 9 or more"),
        ({"rl_oversampling": "17", "rl_generation_lag": "1"}, "17 is more than 2 steps of 8 groups can finish in time "
         "(--rl-generation-lag 1); use at most 16, or --rl-stale-samples drop"),
        (DYNAMIC | {"rl_surplus": "keep"}, "with --rl-surplus keep, which it does not need"),
        (DYNAMIC | {"rl_oversampling": "7"}, "is not more than --grpo-prompts-per-step 8; use 9 or more"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(problems, changes, text):
    (problem,) = problems(**ON, **changes)
    assert text in problem


@pytest.mark.parametrize(
    ("name", "value"), [("rl_generation_lag", "1"), ("rl_stale_samples", "drop"), ("rl_oversampling", "9")]
)
def test_a_setting_without_it_is_refused(problems, name, value):
    (problem,) = problems(**{name: value})
    assert "has no effect without --rl-" in problem


def test_dropping_may_begin_more_than_could_be_finished(problems):
    changes = {"rl_oversampling": "17", "rl_generation_lag": "1", "rl_stale_samples": "drop"}
    assert problems(**ON, **changes) == []
