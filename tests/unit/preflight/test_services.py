"""What is asked of wandb, by flag or by environment variable."""

from __future__ import annotations

import pytest

from megatron_rl.preflight import services
from megatron_rl.preflight.services import service_problems
from tests.support.tiny import tiny_config


def test_nccl_needs_a_gpu() -> None:
    (line,) = service_problems(tiny_config(distributed_backend="nccl"))
    assert line.startswith("--distributed-backend nccl, and there is no CUDA device here; use auto")
    elsewhere = {"check": True, "check_world_size": 1}
    assert service_problems(tiny_config(distributed_backend="nccl", **elsewhere)) == []


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
    monkeypatch: pytest.MonkeyPatch, flag: str | bool, variable: str | None, problem: str | None
) -> None:
    monkeypatch.setattr(services, "_netrc_knows_wandb", lambda: False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", variable or "")
    found = service_problems(tiny_config(wandb_project="p", wandb_mode=flag))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
    assert service_problems(tiny_config()) == []
