"""Algorithms are found by their file."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from megatron_rl.algorithms import discovery
from megatron_rl.algorithms.advantages import dr_grpo
from megatron_rl.config import extensions
from megatron_rl.config.extensions import stated
from megatron_rl.config.help import meaning_of
from megatron_rl.config.rl_config import all_flags
from megatron_rl.errors import ConfigError
from megatron_rl.quantization import available_recipes


def test_every_file_with_a_compute_function_is_available() -> None:
    assert discovery.available("advantages") == ("batch_norm", "dr_grpo", "grpo", "rloo")
    assert discovery.available("losses") == ("cispo", "clip", "gspo")
    # statistics.py lies in the same folder and is no correction.
    assert discovery.available("corrections") == (
        "geometric", "masked_is", "none", "sequence_tis", "token_tis", "veto"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("rl_advantage", discovery.available("advantages")),
        ("rl_policy_loss", discovery.available("losses")),
        ("rl_correction", discovery.available("corrections")),
        ("rl_rollout_quantization", available_recipes()),
    ],
)
def test_help_lists_what_there_is(flag: str, names: tuple[str, ...]) -> None:
    (entry,) = [entry for entry in all_flags() if entry.name == flag]
    assert meaning_of(entry).endswith(f" There are: {', '.join(names)}.")


@pytest.mark.parametrize("name", discovery.available("losses"))
def test_defaults_read_from_a_file_are_those_of_its_module(name: str) -> None:
    module = importlib.import_module(f"megatron_rl.algorithms.losses.{name}")
    for constant in ("DEFAULT_CLAMP", "DEFAULT_AGGREGATION"):
        assert stated("algorithms/losses", name, constant) == getattr(module, constant, None)
    assert name != "gspo" or stated("algorithms/losses", name, "DEFAULT_CLAMP") is not None


def test_a_file_that_is_not_there_states_nothing() -> None:
    assert stated("algorithms/losses", "clipp", "DEFAULT_CLAMP") is None


def test_what_a_module_defines_is_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kind"
    folder.mkdir()
    (folder / "own.py").write_text("raise RuntimeError\ndef compute(): ...\n")
    (folder / "borrowed.py").write_text("from somewhere import other as compute\n")
    (folder / "assigned.py").write_text("compute: object = print\n")
    (folder / "helper.py").write_text("def other():\n    compute = 1\n")
    (folder / "__init__.py").write_text("compute = 1\n")
    monkeypatch.setattr(extensions, "_LIBRARY", tmp_path)
    assert extensions.extension_names("kind", "compute") == ("assigned", "borrowed", "own")


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
