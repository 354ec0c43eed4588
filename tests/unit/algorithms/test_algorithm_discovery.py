"""Algorithms are found by their file."""

from __future__ import annotations

import pytest

from megatron_rl.algorithms.advantages import dr_grpo
from megatron_rl.config.reference import help_text
from megatron_rl.errors import ConfigError
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES, RECIPES


def test_every_file_with_the_class_of_its_kind_is_available() -> None:
    assert ADVANTAGES.names() == (
        "batch_norm", "dr_grpo", "gae", "gdpo", "grpo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
        "rloo",
    )  # fmt: skip
    assert LOSSES.names() == ("cispo", "clip", "clip_cov", "gspo", "gspo_token", "kl_cov", "sapo")
    assert FILTERS.names() == ("accuracy", "mean_reward", "signal")
    assert CORRECTIONS.names() == (
        "geometric", "masked_is", "none", "sequence_tis", "token_tis", "veto"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("rl_advantage", ADVANTAGES.names()),
        ("rl_policy_loss", LOSSES.names()),
        ("rl_correction", CORRECTIONS.names()),
        ("rl_group_filter", FILTERS.names()),
        ("rl_rollout_quantization", RECIPES.names()),
    ],
)
def test_help_lists_what_there_is(flag: str, names: tuple[str, ...]) -> None:
    text = " ".join(help_text(common_only=False).split())
    entry = text.partition(f" --{flag.replace('_', '-')} ")[2].partition(" --")[0]
    assert f" Available: {', '.join(names)}." in entry


@pytest.mark.parametrize("name", LOSSES.names())
def test_defaults_read_from_a_file_are_those_of_its_module(name: str) -> None:
    for option in ("clamp_eps_lower", "clamp_eps_upper"):
        assert LOSSES.stated(name, option) == getattr(LOSSES.get(name)(), option, None)
    assert (LOSSES.stated(name, "AGGREGATION") or "token-mean") == LOSSES.get(name).AGGREGATION
    assert name not in ("gspo", "gspo_token", "sapo") or LOSSES.stated(name, "AGGREGATION") == "sequence-mean"


@pytest.mark.parametrize("name", ["dr_grpo", "dr-grpo"])
def test_a_dash_stands_for_an_underscore(name: str) -> None:
    assert ADVANTAGES.module(name) is dr_grpo


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean clip") as refused:
        LOSSES.get("clipp")
    assert "cispo, clip, clip_cov, gspo, gspo_token, kl_cov, sapo" in str(refused.value)
