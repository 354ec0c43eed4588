"""The environment of --deterministic-mode: when it is set, and variables of the user's that differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_rl import platform
from megatron_rl.platform import Platform
from megatron_rl.platform import groups as platform_groups
from megatron_rl.platform.cuda import environment_for
from megatron_rl.platform.groups import initialize
from megatron_rl.run.preflight import preflight
from megatron_rl.run.preflight.machine import determinism_lines
from tests.support.tiny import tiny_config

ON_GPU = Platform(torch.device("cuda", 0), "nccl")
SET = environment_for(batch_invariant=False)


class _Initialised(Exception):
    """The process groups would be made now."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """What the environment is when process groups are made on a GPU."""

    def initialised(given: dict[str, str], **flags: object) -> dict[str, str]:
        def stop(*_: object, **__: object) -> None:
            raise _Initialised

        own, config = dict(given), tiny_config(**flags)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "set_device", lambda _: None)
            patch.setattr(platform_groups.dist, "init_process_group", stop)
            patch.setattr(platform_groups.os, "environ", own)
            with pytest.raises(_Initialised):
                initialize(config.parallel, ON_GPU, config.kernels)
        return own

    return initialised


def test_the_environment_is_set_before_a_group_is_made(environment: Callable[..., dict[str, str]]) -> None:
    assert SET["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and SET["NCCL_ALGO"] == "Ring"
    assert not SET.keys() & environment({}).keys()
    assert environment({}, deterministic_mode=True).items() >= SET.items()
    kept = environment({"NCCL_ALGO": "Tree"}, deterministic_mode=True)
    assert kept["NCCL_ALGO"] == "Tree" and kept["NCCL_PROTO"] == "Simple"
    assert environment({}, batch_invariant_mode=True, bf16=True)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    ("name", "value", "is_kept", "line"),
    [
        ("NCCL_NVLS_ENABLE", "1", True, "sets NCCL_NVLS_ENABLE=0, where it is 1, and is kept: sums over GPUs may not"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", False, "sets CUBLAS_WORKSPACE_CONFIG=:4096:8, where it is :0:0, with"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", False, "sets NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, where it is 1"),
    ],
)
def test_variables_of_the_users(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_kept: bool, line: str
) -> None:
    """NCCL's are kept with a note; with the others torch or Transformer Engine raises, so they are refused."""
    monkeypatch.setattr(platform, "current_platform", lambda: ON_GPU)
    config = tiny_config(deterministic_mode=True)
    for each in SET:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert not [*determinism_lines(config, kept=True), *determinism_lines(config, kept=False)]
    monkeypatch.setenv(name, value)
    (found,) = determinism_lines(config, kept=is_kept)
    assert found.startswith(f"--deterministic-mode {line}")
    assert not [*determinism_lines(config, kept=not is_kept)]
    assert not [*determinism_lines(tiny_config(), kept=is_kept)]
    refused = [problem.text for problem in preflight(config, is_run=False) if "deterministic" in problem.text]
    assert refused == ([] if is_kept else [found])


def test_a_cpu_takes_the_flag_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    config = tiny_config(deterministic_mode=True)
    (note,) = determinism_lines(config, kept=True)
    assert note == "--deterministic-mode changes nothing on a CPU, where runs repeat their bits anyway"
    assert not [*determinism_lines(config, kept=False)]
    elsewhere = tiny_config(deterministic_mode=True, check=True, check_world_size=1)
    assert not [*determinism_lines(elsewhere, kept=True)]
