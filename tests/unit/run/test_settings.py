"""A start that goes on says in one line what it was told otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from megatron_rl.run.resume import Settings
from tests.support.tiny import tiny_config


@pytest.fixture(autouse=True)
def lines_are_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    caplog.set_level(logging.INFO)


def _saved(**flags: object) -> dict[str, object]:
    return json.loads(json.dumps(Settings(tiny_config(**flags)).state_dict()))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {"seed": 5}, "--seed 5 (was --seed 1234)"),
        ({"rl_temperature": 0.5}, {}, "--rl-temperature 1.0 (was --rl-temperature 0.5)"),
        ({}, {"rl_stop_strings": ("a b", "c")}, "--rl-stop-strings 'a b' c (was --rl-stop-strings)"),
        ({"lr_warmup_iters": 1}, {}, "--lr-warmup-iters 0 (was --lr-warmup-iters 1)"),
        ({}, {"rl_rollout_quantization": "int8"}, "--rl-rollout-quantization int8 (was --rl-rollout-quantization "),
        ({}, {"no_rl_prefix_reuse": True}, "--no-rl-prefix-reuse (was --rl-prefix-reuse)"),
        (
            {"grpo_group_size": 8, "lr": 0.02, "rl_max_new_tokens": 9}, {"rl_max_new_tokens": 9},
            "--lr 0.01 (was --lr 0.02), --grpo-group-size 4 (was --grpo-group-size 8)",
        ),
    ],
)  # fmt: skip
def test_changed_flags_are_one_line(before: dict, now: dict, told: str, caplog: pytest.LogCaptureFixture) -> None:
    Settings(tiny_config(**now)).load_state_dict(_saved(**before))
    (line,) = caplog.messages
    assert line.startswith("changed since the checkpoint: ")
    assert all(part in line for part in told.split(", "))


def test_what_a_start_reads_and_writes_is_nothing_to_tell_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    again = {"run_dir": tmp_path, "resume": True, "save_interval": 3, "log_interval": 2, "mock_data": True}
    Settings(tiny_config(**again)).load_state_dict(_saved())
    Settings(tiny_config()).load_state_dict({"a_flag_of_before": 1})
    assert caplog.messages == []


def test_an_environment_list_is_compared_by_its_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text("[a]")
    other.write_text("[a]")
    saved = _saved(langrl_env_config=one)
    Settings(tiny_config(langrl_env_config=other)).load_state_dict(saved)
    assert caplog.messages == []
    one.write_text("[a, b]")
    Settings(tiny_config(langrl_env_config=one)).load_state_dict(saved)
    assert caplog.messages == [f"changed since the checkpoint: --langrl-env-config {one} (was other content)"]
