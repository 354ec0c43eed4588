"""Algorithms are found by their file."""

from __future__ import annotations

import pytest

from megatron_rl.algorithms import discovery
from megatron_rl.algorithms.advantages import dr_grpo
from megatron_rl.errors import ConfigError


def test_every_file_with_a_compute_function_is_available() -> None:
    assert discovery.available("advantages") == ("batch_norm", "dr_grpo", "grpo", "rloo")
    assert discovery.available("losses") == ("cispo", "clip", "gspo")
    # statistics.py lies in the same folder and is no correction.
    assert discovery.available("corrections") == (
        "geometric", "masked_is", "none", "sequence_tis", "token_tis", "veto"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["dr_grpo", "dr-grpo"])
def test_a_dash_stands_for_an_underscore(name: str) -> None:
    assert discovery.advantage(name) is dr_grpo


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean clip") as refused:
        discovery.get("losses", "clipp")
    assert "cispo, clip, gspo" in str(refused.value)


def test_a_helper_module_is_no_extension() -> None:
    with pytest.raises(ConfigError, match="statistics"):
        discovery.get("corrections", "statistics")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="losses"):
        discovery.available("loses")
