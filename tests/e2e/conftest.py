"""One folder for the session: a tokenizer, environment lists and a checkpoint to start from."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    os.environ.pop("WANDB_API_KEY", None)
    return Workshop(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def warm_start(workshop: Workshop) -> Path:
    """Checkpoints of a short supervised run."""
    run(workshop.supervised("warm_start", train_iters=10)).check()
    return workshop.run_dir("warm_start") / "checkpoints"
