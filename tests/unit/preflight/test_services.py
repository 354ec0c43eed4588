"""What is asked of wandb, by flag or by environment variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.preflight.machine import service_problems
from tests.support.tiny import tiny_config


def test_nccl_needs_a_gpu() -> None:
    (problem,) = service_problems(tiny_config(distributed_backend="nccl"))
    assert problem.text.startswith("--distributed-backend nccl, and there is no CUDA device here; use auto")
    elsewhere = {"check": True, "check_world_size": 1}
    assert list(service_problems(tiny_config(distributed_backend="nccl", **elsewhere))) == []


@pytest.mark.parametrize(
    ("flag", "variable", "problem"),
    [
        (False, None, None),
        (False, "disabled", None),
        (False, "offline", None),
        (False, "online", "online needs an API key"),
        ("online", "disabled", "online needs an API key"),
        ("offline", "online", None),
        (False, "off", "WANDB_MODE=off is not offline, online, disabled"),
    ],
)
def test_the_flag_wins_over_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str | bool, variable: str | None, problem: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", variable or "")
    found = list(service_problems(tiny_config(wandb_project="p", wandb_mode=flag)))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0].text
    assert list(service_problems(tiny_config())) == []
