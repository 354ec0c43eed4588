"""Folders with a tokenizer and environment lists, and a checkpoint to start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.runs import RL, SUPERVISED, TINY, command, run
from tests.support.tiny import write_tokenizer


class Workshop:
    """Makes commands whose every file lies in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = write_tokenizer(folder / "tokenizer")
        self.digits = self.environments("digits", [{"environment": "tests.support.e2e_environments:Digits"}])

    def environments(self, name: str, entries: list[dict[str, Any]]) -> Path:
        """Write an environment list."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(entries))
        return path

    def run_dir(self, name: str) -> Path:
        """Where the run ``name`` writes."""
        return self.folder / "runs" / name

    def rl(self, name: str, **changes: Any) -> list[str]:
        """The command of an RL run; a change to None removes a flag."""
        return self._command(name, RL, changes)

    def supervised(self, name: str, **changes: Any) -> list[str]:
        """The command of a supervised run."""
        return self._command(name, SUPERVISED, changes)

    def _command(self, name: str, kind: dict[str, Any], changes: dict[str, Any]) -> list[str]:
        flags = {
            **TINY,
            **kind,
            "tokenizer-model": self.tokenizer,
            "langrl-env-config": self.digits,
            "run-dir": self.run_dir(name),
        }
        return command(flags | {flag.replace("_", "-"): value for flag, value in changes.items()})


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A folder for each module, so that two of them may give their runs the same names."""
    return Workshop(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a short supervised run."""
    shared = Workshop(tmp_path_factory.mktemp("warm_start"))
    run(shared.supervised("warm_start", train_iters=10)).check()
    return shared.run_dir("warm_start") / "checkpoints"


@pytest.fixture(scope="module", autouse=True)
def no_wandb_account() -> Iterator[None]:
    """Tests of what is missing must not find the developer's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("HOME", "/nonexistent")
        yield
