"""What is asked of wandb, by flag or by environment variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl import main
from megatron_rl.errors import Problem
from megatron_rl.platform import Platform
from megatron_rl.run.preflight.machine import backend_problems, quantization_problems, service_problems
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


def test_what_this_machine_lacks_is_a_note_where_the_run_is_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check --check-world-size 64` on a laptop: no Transformer Engine, no GPU of the right kind, no account."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(Platform, "compute_capability", (8, 6))
    asked = {"transformer_impl": "transformer_engine", "wandb_project": "p", "wandb_mode": "online"}
    fp8 = {"rl_rollout_quantization": "fp8"}

    def found(**flags: object) -> list[Problem]:
        config = tiny_config(world_size=64, check=True, **flags)
        return [*service_problems(config), *quantization_problems(config)]

    assert [problem.flag for problem in (*found(**asked), *found(**fp8))] == [
        "--wandb-mode", "--transformer-impl", "--rl-rollout-quantization",
    ]  # fmt: skip
    assert found(**asked, check_world_size=64) == found(**fp8, check_world_size=64) == []
    monkeypatch.setattr(main, "every_problem", lambda *_: [])
    flags = ["--transformer-impl", "transformer_engine", "--wandb-project", "p", "--wandb-mode", "online"]
    assert main.main(["train_rl.py", "--check", "--check-world-size", "64", *flags]) == 0
    note, valid = capsys.readouterr().out.splitlines()
    assert note.startswith("note: --transformer-impl transformer_engine, but Transformer Engine is not installed here")
    assert valid == "configuration is valid"


def test_too_few_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -n 64`: gloo raised where the process groups are made."""
    monkeypatch.setattr("megatron_rl.run.preflight.machine.FILES", 10**9)
    [problem] = backend_problems(tiny_config())
    assert problem.text.startswith("this process may open ") and problem.text.endswith("; run ulimit -n 1000000000")
