"""The run directory: what lies where, and whether a path may become one.

The layout::

    run.json  config.yaml  config.diff.yaml  command.txt  metrics.jsonl  summary.json  report.html
    quantization.json (quantised rollouts)  evaluation.json (--eval-only)
    tensorboard/  rollouts/step_000012.jsonl  rollouts/eval_000012.jsonl  checkpoints/  journal/  logs/
"""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_rl.atomic import write_text_atomic
from megatron_rl.metrics.jsonl import read_json_object, read_rows, to_plain, write_json_atomic
from megatron_rl.metrics.provenance import git_commit, package_versions

Status = Literal["running", "finished", "stopped", "failed"]


class RunDirectory:
    """Paths of a run, and the small files that describe it. Only one rank may create or write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = path / "run.json"
        self.config = path / "config.yaml"
        self.config_diff = path / "config.diff.yaml"
        self.command = path / "command.txt"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.quantization = path / "quantization.json"
        self.tensorboard = path / "tensorboard"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.logs = path / "logs"
        self.folders = (self.tensorboard, self.rollouts, self.checkpoints, self.logs)

    def create(
        self,
        config: Mapping[str, Any],
        config_diff: Mapping[str, Any],
        command: Sequence[str],
    ) -> None:
        """Make the layout, or take up an existing run: the start is kept, the new command is added."""
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._write_yaml(self.config, config)
        self._write_yaml(self.config_diff, config_diff)
        earlier = self.command.read_text(encoding="utf-8") if self.command.exists() else ""
        write_text_atomic(self.command, earlier + shlex.join(command) + "\n")
        self._write_facts(command)

    def set_status(self, status: Status, **facts: object) -> None:
        """Record how the run stands, with further facts such as ``step=80`` or ``error="..."``."""
        now = _now()
        write_json_atomic(self.facts, {**self.read_facts(), "status": status, "updated": now, **facts})

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write ``summary.json``: the numbers one asks for first."""
        write_json_atomic(self.summary, summary)

    def write_quantization(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write ``quantization.json``: what every linear layer really ran in, in the first rollout."""
        write_json_atomic(self.quantization, {"layers": list(rows)})

    def rollouts_path(self, step: int) -> Path:
        """Rollout records of a step."""
        return self.rollouts / f"step_{step:06d}.jsonl"

    def evaluation_path(self, step: int) -> Path:
        """Records of the held-out answers after a step."""
        return self.rollouts / f"eval_{step:06d}.jsonl"

    def read_facts(self) -> dict[str, Any]:
        """``run.json``, empty when absent or damaged."""
        return read_json_object(self.facts)

    def last_step(self) -> int | None:
        """Step of the last row of ``metrics.jsonl``."""
        rows = read_rows(self.metrics)
        return rows[-1]["step"] if rows else None

    def holds_run(self) -> bool:
        """Whether something would be lost here. A start that failed before its first step is nothing."""
        if self.last_step() is not None or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir())):
            return True
        return self.facts.exists() and self.read_facts().get("status") != "failed"

    def _write_facts(self, command: Sequence[str]) -> None:
        earlier = self.read_facts() if self.holds_run() else {}
        now = _now()
        start = {
            "command": list(command),
            "host": socket.gethostname(),
            "git_commit": git_commit(),
            "versions": package_versions(),
        }
        facts = {
            "status": "running",
            "created": earlier.get("created", now),
            "updated": now,
            **start,
            "starts": [*earlier.get("starts", []), {"time": now, **start}],
        }
        write_json_atomic(self.facts, facts)

    @staticmethod
    def _write_yaml(path: Path, value: Mapping[str, Any]) -> None:
        plain = to_plain(value, null_nonfinite=False)
        write_text_atomic(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def check_usable(path: Path, resume: bool) -> list[str]:
    """Why ``path`` cannot be the run directory, one sentence each; empty when it can.

    A directory that exists is fine while it holds no run. With ``resume``, a directory without a run is fine
    too: the same command then serves the first start and every restart of a scheduler.
    """
    fault = unwritable(path)
    if fault is not None:
        return [fault]
    run = RunDirectory(path)
    in_the_way = [folder for folder in run.folders if folder.exists() and not folder.is_dir()]
    if in_the_way:
        return [f"{folder} is a file where a directory is needed; move it away" for folder in in_the_way]
    if resume or not run.holds_run():
        return []
    step = run.last_step()
    where = "before its first step" if step is None else f"at step {step}"
    status = run.read_facts().get("status", "unknown")
    return [
        f"{path} already holds a run ({where}, status {status}); continue it with --resume or choose another directory"
    ]


def unwritable(directory: Path) -> str | None:
    """Why nothing can be written in ``directory``, which need not be there yet; None where it can."""
    if directory.resolve().parent == directory.resolve():
        return f"{directory} is the root of the file system; name a directory for this run alone, such as runs/NAME"
    existing = directory
    while not os.path.exists(existing):  # Path.exists raises below an unsearchable directory
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is a file, so {directory} cannot be made; choose another directory"
    try:  # permissions promise root too much, and one who may write may still lack the right to search
        if os.access(existing, os.W_OK | os.X_OK):
            with tempfile.TemporaryDirectory(prefix=".writable_", dir=existing):
                return None
    except OSError:
        pass
    return f"{existing} is not writable, so {directory} cannot be made; choose another directory"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
