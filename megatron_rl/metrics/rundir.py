"""The run directory: what lies where, where the run came from, and whether a path may become one.

The layout::

    run.json  config.yaml  config.diff.yaml  command.txt  metrics.jsonl  summary.json  report.html
    quantization.json (quantised rollouts)  evaluation.json (--eval-only)
    tensorboard/  rollouts/step_000012.jsonl  rollouts/eval_000012.jsonl  checkpoints/  journal/  logs/
    replays/step_000012_group_0_sample_3.html (megatron-rl replay)
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from megatron_rl.atomic import write_text_atomic
from megatron_rl.errors import ConfigError, one_line
from megatron_rl.metrics.jsonl import read_json_object, read_rows, write_json_atomic
from megatron_rl.signals import by_torchrun
from megatron_rl.user_files import read_text

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "triton", "megatron-rl")
GIT_TIMEOUT_S = 10.0
Status = Literal["running", "finished", "stopped", "failed"]


class RunDirectory:
    """Paths of a run, and the small files that describe it. Only one rank creates and writes."""

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
        self.replays = path / "replays"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.logs = path / "logs"
        self.folders = (self.tensorboard, self.rollouts, self.checkpoints, self.journal, self.logs)
        self.files = (self.facts, self.config, self.config_diff, self.command, self.metrics, self.summary, self.report)

    def create(self, config: Mapping[str, Any], config_diff: Mapping[str, Any], command: Sequence[str]) -> None:
        """Make the layout; of an existing run keep the start and add the new command."""
        self.logs.mkdir(parents=True, exist_ok=True)  # whoever writes into another folder makes it
        for path, values in ((self.config, config), (self.config_diff, config_diff)):
            write_text_atomic(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        earlier = self.command.read_text(encoding="utf-8", errors="replace") if self.command.exists() else ""
        write_text_atomic(self.command, earlier + shlex.join(command) + "\n")
        facts, now = self.read_facts() if self.holds_run() else {}, _now()
        start = {
            "command": list(command),
            "host": socket.gethostname(),
            "git_commit": git_commit(),
            "versions": package_versions(),
        }
        starts = [*facts.get("starts", []), {"time": now, **start}]
        created = facts.get("created", now)
        write_json_atomic(
            self.facts, {"status": "running", "created": created, "updated": now, **start, "starts": starts}
        )

    def set_status(self, status: Status, **facts: object) -> None:
        """Record how the run stands, with further facts such as ``step=80`` or ``error="..."``."""
        now = _now()
        write_json_atomic(self.facts, {**self.read_facts(), "status": status, "updated": now, **facts})

    def write_quantization(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write ``quantization.json``: what every linear layer really ran in, in the first rollout."""
        write_json_atomic(self.quantization, {"layers": list(rows)})

    def rollouts_path(self, step: int) -> Path:
        """Return the path of the rollout records of a step."""
        return self.rollouts / f"step_{step:06d}.jsonl"

    def evaluation_path(self, step: int) -> Path:
        """Records of the held-out answers after a step."""
        return self.rollouts / f"eval_{step:06d}.jsonl"

    def read_facts(self) -> dict[str, Any]:
        """Return ``run.json``, empty when absent or damaged."""
        return read_json_object(self.facts)

    def read_settings(self) -> dict[str, Any]:
        """Read ``config.yaml``: field -> value, whatever its section; ``ConfigError`` if it is not one of ours."""
        not_one = f"{self.path} is no run directory: {self.config.name}"
        try:
            text = read_text(self.config)
        except ValueError as error:
            raise ConfigError([f"{not_one} {error}"]) from error
        try:
            sections = yaml.safe_load(text)
            flat = {name: value for section in sections.values() for name, value in section.items()}
            return flat | {"run_dir": str(flat["run_dir"])}
        except (ValueError, yaml.YAMLError, AttributeError, KeyError, RecursionError) as error:
            raise ConfigError([f"{not_one} cannot be read ({one_line(str(error), 200)})"]) from error

    def last_step(self) -> int | None:
        """Step of the last row of ``metrics.jsonl``."""
        rows = read_rows(self.metrics)
        return rows[-1]["step"] if rows else None

    def holds_run(self) -> bool:
        """Return whether there is something to lose. A start that failed before its first step is nothing."""
        if self.last_step() is not None or (self.checkpoints.is_dir() and any(self.checkpoints.glob("[!.]*"))):
            return True
        return self.facts.exists() and self.read_facts().get("status") != "failed"


def check_usable(path: Path, resume: bool) -> list[str]:
    """Say why ``path`` cannot be the run directory, one sentence each; empty when it can.

    A directory that exists is fine while it holds no run; with ``resume`` a run is fine, too, but not needed: the same
    command serves the first start and every restart.
    """
    fault = unwritable(path)
    if fault is not None:
        return [fault]
    run = RunDirectory(path)
    folders, files = (*run.folders, *run.logs.glob("environments_*")), run.files
    there = [path for path in (*folders, *files) if path.exists()]
    wrong = [f"{path} is a file where a directory is needed" for path in there if path in folders and not path.is_dir()]
    wrong += [f"{path} is not a file, which is needed there" for path in there if path in files and not path.is_file()]
    if wrong:
        return [f"{line}; move it away" for line in wrong]
    if closed := next((path for path in there if not os.access(path, os.W_OK)), None):
        return [f"{closed} is not writable by this user, so no run can go on here; choose another directory"]
    if resume or not run.holds_run():
        return []
    step = run.last_step()
    where = "before its first step" if step is None else f"at step {step}"
    status = run.read_facts().get("status", "unknown")
    return [
        f"{path} already holds a run ({where}, status {status}); continue it with --resume or choose another directory"
    ]


def unwritable(directory: Path) -> str | None:
    """Say why nothing can be written in ``directory``, which need not exist yet; None where it can."""
    if os.path.realpath(directory) == "/":
        return f"{directory} is the root of the file system; name a directory for this run alone, such as runs/NAME"
    existing = directory
    while not os.path.lexists(existing):  # Path.exists raises below an unsearchable directory
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is a file or a broken link, so {directory} cannot be made; choose another directory"
    try:  # permissions promise root too much, and one who may write may still lack the right to search
        if os.access(existing, os.W_OK | os.X_OK):
            with tempfile.TemporaryDirectory(prefix=".writable_", dir=existing):
                return None
    except OSError:
        pass
    return f"{existing} is not writable, so {directory} cannot be made; choose another directory"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that decide the numbers."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def git_commit() -> str | None:
    """Return the commit of the checkout this library runs from, ``-dirty`` when edited; None outside a checkout."""
    folder = Path(__file__).parent
    if "site-packages" in folder.parts:  # the repository around a virtual environment is the user's
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def typed_command(argv: Sequence[str]) -> list[str]:
    """Return the words that start this again, with ``torchrun``, ``-m`` or the interpreter, which ``argv`` leaves out.

    It is ``argv`` itself if no command line ends with its flags.
    """
    flags, lines = list(argv[1:]), [list(sys.orig_argv)]
    if by_torchrun():
        with contextlib.suppress(psutil.Error, AttributeError):  # it has ended, or may not be looked at
            lines.insert(0, psutil.Process().parent().cmdline())
    return next((words for words in lines if words and words[len(words) - len(flags) :] == flags), list(argv))
