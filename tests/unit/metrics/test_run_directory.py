"""The layout of a run and which paths may hold one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_rl.metrics.jsonl import JsonlWriter, write_json_atomic
from megatron_rl.metrics.rundir import RunDirectory, check_usable

COMMAND = ["python", "train_rl.py", "--wandb-exp-name", "a name"]
CONFIG = {"algorithm": {"grpo_group_size": 8, "cap": float("inf"), "names": ["a", "b"]}}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "first")
    run.create(CONFIG, {"algorithm": {"grpo_group_size": 8}}, COMMAND)
    return run


def write_steps(run: RunDirectory, last: int) -> None:
    writer = JsonlWriter(run.metrics)
    for step in range(1, last + 1):
        writer.write(step, {})
    writer.close()


def test_create_lays_out_the_directory(run: RunDirectory) -> None:
    assert {entry.name for entry in run.path.iterdir()} == {
        *("run.json", "config.yaml", "config.diff.yaml", "command.txt", "logs"),
    }
    assert yaml.safe_load(run.config.read_text()) == {
        "algorithm": {"grpo_group_size": 8, "cap": float("inf"), "names": ["a", "b"]}
    }
    assert run.command.read_text() == "python train_rl.py --wandb-exp-name 'a name'\n"
    facts = json.loads(run.facts.read_text())
    assert facts["status"] == "running"
    assert facts["command"] == COMMAND
    assert {"python", "torch", "megatron-core"} <= set(facts["versions"])
    assert facts["host"] and facts["created"]


def test_rollouts_path_sorts_by_step(run: RunDirectory) -> None:
    assert run.rollouts_path(12) == run.path / "rollouts" / "step_000012.jsonl"


def test_status_and_summary_are_strict_json(run: RunDirectory) -> None:
    run.set_status("failed", step=3, error="boom")
    write_json_atomic(run.summary, {"pass@1": 0.5, "loss": float("nan")})
    facts = run.read_facts()
    assert (facts["status"], facts["step"], facts["error"], facts["command"]) == (
        "failed",
        3,
        "boom",
        COMMAND,
    )
    assert json.loads(run.summary.read_text()) == {"pass@1": 0.5, "loss": None}


def test_resumed_run_keeps_its_beginning(run: RunDirectory) -> None:
    write_steps(run, 2)
    created = run.read_facts()["created"]
    run.create(CONFIG, {}, [*COMMAND, "--resume"])
    facts = run.read_facts()
    assert facts["created"] == created
    assert [start["command"][-1] for start in facts["starts"]] == ["a name", "--resume"]
    assert len(run.command.read_text().splitlines()) == 2
    assert run.last_step() == 2


def test_fresh_empty_and_unrelated_directories_are_usable(tmp_path: Path) -> None:
    (tmp_path / "other" / "warm_start").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("absent/deeper", "empty", "other"):
        assert check_usable(tmp_path / name, resume=False) == []
        assert check_usable(tmp_path / name, resume=True) == []


def test_a_run_is_not_overwritten(run: RunDirectory) -> None:
    write_steps(run, 7)
    run.set_status("stopped")
    assert check_usable(run.path, resume=False) == [
        f"{run.path} already holds a run (at step 7, status stopped); "
        "continue it with --resume or choose another directory"
    ]
    assert check_usable(run.path, resume=True) == []


def test_a_run_before_its_first_step_is_a_run_unless_it_failed(run: RunDirectory) -> None:
    assert "before its first step" in check_usable(run.path, resume=False)[0]
    run.set_status("failed")
    assert check_usable(run.path, resume=False) == []


def test_checkpoints_alone_make_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    assert len(check_usable(tmp_path, resume=False)) == 1


def test_files_in_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in check_usable(tmp_path / "file", resume=False)[0]
    assert "is a file" in check_usable(tmp_path / "file" / "below", resume=True)[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    assert "checkpoints is a file" in check_usable(tmp_path / "run", resume=False)[0]


@pytest.mark.parametrize("name", ["/", "//", "/tmp/.."])
def test_the_root_of_the_file_system_is_no_run_directory(name: str) -> None:
    assert "is the root of the file system; name a directory" in check_usable(Path(name), resume=True)[0]


def test_unwritable_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "not writable" in check_usable(tmp_path / "run", resume=False)[0]


def test_what_permissions_promise_is_tried() -> None:
    """The superuser may write to /proc by its permissions, and cannot."""
    assert "/proc is not writable" in check_usable(Path("/proc/run"), resume=False)[0]


def test_trying_leaves_no_trace(tmp_path: Path) -> None:
    assert check_usable(tmp_path / "run", resume=False) == []
    assert list(tmp_path.iterdir()) == []


FILES = ("run.json", "config.yaml", "config.diff.yaml", "command.txt", "metrics.jsonl", "summary.json", "report.html")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_one_line_that_names_it(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    for resume in (False, True):
        assert check_usable(tmp_path, resume) == [
            f"{tmp_path / name} is not a file, which is needed there; move it away"
        ]  # fmt: skip


def test_a_command_of_garbage_stays_and_the_new_one_is_added(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.command.write_bytes(b"\xff\x00\xfe garbage\n")
    assert check_usable(tmp_path, resume=True) == []
    run.create({}, {}, ["train_rl.py", "--resume"])
    before, last = run.command.read_text().splitlines()
    assert before.endswith(" garbage") and last == "train_rl.py --resume"


@pytest.mark.parametrize("name", ["checkpoints", "journal", "logs", "logs/environments_here", "metrics.jsonl"])
def test_a_run_directory_with_parts_of_another_user_is_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions bind no root, so the kernel's answer is replaced."""
    path, access = tmp_path / name, os.access
    path.parent.mkdir(exist_ok=True)
    path.touch() if path.suffix else path.mkdir()
    monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != path and access(asked, mode))
    assert check_usable(tmp_path, resume=True) == [
        f"{path} is not writable by this user, so no run can go on here; choose another directory"
    ]
