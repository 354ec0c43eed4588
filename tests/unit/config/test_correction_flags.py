"""The flags of loss and mismatch correction: defaults, bounds and what is refused before a model is built."""

from __future__ import annotations

import pytest

from megatron_rl.config.rl_config import resolve
from megatron_rl.errors import ConfigError
from megatron_rl.run.preflight import extension_problems
from tests.support.flags import parse_config


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "none"),
        ({"rl_rollout_quantization": "int8"}, "token_tis"),
        ({"rl_rollout_quantization": "int8", "rl_correction": "none"}, "none"),
        ({"rl_correction": "token_tis+veto"}, "token_tis+veto"),
        ({"rl_kv_cache_dtype": "fp8"}, "token_tis"),
        ({"rl_kv_cache_dtype": "bf16"}, "token_tis"),
        ({"rl_kv_cache_dtype": "bf16", "bf16": True}, "none"),
    ],
)
def test_quantised_rollouts_are_corrected_by_default(config, changes, name):
    assert resolve(config(**changes), 1).algorithm.rl_correction == name


@pytest.mark.parametrize(
    ("flag", "value"),
    [("cap", "0"), ("lower", "-0.1"), ("lower", "1"), ("upper", "1"), ("veto", "0"), ("veto", "1")],
)
def test_a_value_out_of_bounds_is_refused_in_one_line(command, flag, value):
    with pytest.raises(ConfigError, match=f"--rl-correction-{flag} must be") as refused:
        parse_config(command(**{f"rl_correction_{flag}": value}))
    assert len(refused.value.lines) == 1


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rl_correction": "tis"}, ["--rl-correction", "'tis'", "did you mean token_tis"]),
        ({"rl_correction": "token_tis+geometrc"}, ["'geometrc'", "did you mean geometric"]),
        ({"rl_correction": "veto+veto"}, ["--rl-correction veto+veto", "twice"]),
        ({"rl_correction": "token_tis", "rl_correction_lower": "0.9"}, ["'lower'", "--rl-correction-lower"]),
        ({"rl_correction_upper": "1.1"}, ["none has no option 'upper'", "--rl-correction-upper", "geometric"]),
        ({"rl_correction": "none", "rl_correction_cap": "3"}, ["'cap'", "sequence_tis or token_tis"]),
    ],
)
def test_a_correction_that_cannot_be_is_refused_in_one_line(config, changes, parts):
    (problem,) = extension_problems(resolve(config(**changes), 1))[1]
    assert problem.flag == "--rl-correction"
    assert all(part in problem.text for part in parts), problem


def test_a_loss_without_dual_clip_refuses_it(config):
    (problem,) = extension_problems(resolve(config(rl_policy_loss="cispo", rl_dual_clip="3"), 1))[1]
    assert problem.flag == "--rl-policy-loss"
    for part in ("--rl-policy-loss cispo has no option 'dual_clip'", "--rl-dual-clip", "use clip or clip_cov or gspo"):
        assert part in problem.text


def test_bounds_are_read_by_a_part_of_a_composition(config):
    changes = {"rl_correction": "token_tis+geometric", "rl_correction_lower": "0.9", "rl_correction_upper": "1.1"}
    assert extension_problems(resolve(config(**changes), 1))[1] == []
