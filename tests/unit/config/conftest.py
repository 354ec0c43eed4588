"""A small valid RL command that each test changes in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import validate
from tests.support.flags import parse_config

WORKING = {
    "perform-rl-step": True,
    "num-layers": "4",
    "hidden-size": "64",
    "num-attention-heads": "8",
    "seq-length": "128",
    "tokenizer-model": "tokenizer",
    "lr": "1e-3",
    "train-iters": "100",
    "run-dir": "runs/test",
    "langrl-env-config": "environments.yaml",
    "grpo-prompts-per-step": "8",
    "grpo-group-size": "4",
}

Command = Callable[..., list[str]]
Problems = Callable[..., list[str]]


def build_command(**changes: str | bool | None) -> list[str]:
    """The working command with ``changes``: True adds a switch, None removes a flag."""
    merged = WORKING | {name.replace("_", "-"): value for name, value in changes.items()}
    argv: list[str] = []
    for name, value in merged.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not None:
            argv += [f"--{name}", *str(value).split()]
    return argv


@pytest.fixture
def command() -> Command:
    return build_command


@pytest.fixture
def config() -> Callable[..., RLConfig]:
    return lambda **changes: parse_config(build_command(**changes))


@pytest.fixture
def problems() -> Problems:
    """The broken rules of the working command after ``changes``, on ``ranks`` ranks."""
    return lambda ranks=1, **changes: list(map(str, validate(parse_config(build_command(**changes)), ranks)))
