"""The command that a run writes down is one that starts it again."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from megatron_rl.metrics import rundir
from megatron_rl.metrics.rundir import typed_command

SAY = """
import json, sys
from megatron_rl.metrics.rundir import typed_command
print(json.dumps(typed_command(["x", *sys.argv[1:]])))
"""
FLAGS = ["--run-dir", "a name", "--resume"]


def test_what_was_typed_is_written_down() -> None:
    typed = [sys.executable, "-c", SAY, *FLAGS]
    assert json.loads(subprocess.run(typed, capture_output=True, text=True, check=True).stdout) == typed


def test_torchrun_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/v/bin/python", "/v/bin/torchrun", "--nproc-per-node=2", "train_rl.py", *FLAGS]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: words)
    assert typed_command(["train_rl.py", *FLAGS]) == words
    assert typed_command(["train_rl.py", "--other"]) == ["train_rl.py", "--other"]  # nobody typed that


def test_a_launcher_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(psutil.Process, "cmdline", refuse)
    monkeypatch.setattr(rundir.sys, "orig_argv", ["python", "train_rl.py", *FLAGS])
    assert typed_command(["train_rl.py", *FLAGS]) == ["python", "train_rl.py", *FLAGS]
