"""Checkpoints of two small files each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.checkpoint.layout import commit, temporary_directory


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write and commit the checkpoint of a step in ``tmp_path``."""

    def write(step: int, text: str = "weights") -> Path:
        folder = temporary_directory(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "tensors.distcp").write_text(f"{text} {step}")
        (folder / "run_state.json").write_text("{}")
        return commit(tmp_path, step)

    return write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where checkpoints of Megatron-LM's format torch are converted to."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron-rl"
