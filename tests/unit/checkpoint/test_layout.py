"""Names, the atomic commit, finding and deleting."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from megatron_rl import atomic
from megatron_rl.checkpoint.layout import (
    commit,
    find_checkpoint,
    holds_checkpoint,
    list_checkpoints,
    newest_valid,
    remove_old,
    set_aside_newer,
    step_directory,
    step_of,
    temporary_directory,
    verify,
)
from megatron_rl.errors import CheckpointError


@pytest.fixture(autouse=True)
def warnings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure_logging`, called by another test, cuts the library's loggers off from pytest's."""
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_names_sort_by_step_beyond_their_width(tmp_path):
    for step in (10_000_000, 40, 9_999_999):
        step_directory(tmp_path, step).mkdir()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [40, 9_999_999, 10_000_000]


def test_only_committed_steps_are_listed(tmp_path, save):
    save(4)
    temporary_directory(tmp_path, 8).mkdir()
    (tmp_path / "step_0000002.damaged").mkdir()
    (tmp_path / "step_0000006").write_text("a file")
    assert list_checkpoints(tmp_path) == [step_directory(tmp_path, 4)]
    assert list_checkpoints(tmp_path / "absent") == []


def test_a_commit_leaves_the_checkpoint_its_manifest_and_the_pointer(tmp_path, save):
    target = save(4)
    assert target == step_directory(tmp_path, 4)
    assert _names(tmp_path) == ["latest", "step_0000004"]
    assert _names(target) == ["manifest.json", "run_state.json", "tensors.distcp"]
    assert (tmp_path / "latest").read_text() == "step_0000004\n"
    verify(target)


def test_a_commit_goes_manifest_disk_rename_pointer(tmp_path, monkeypatch):
    """Nothing is renamed before it is on the disk, and the pointer moves last."""
    events: list[str] = []
    sync, replace = atomic.sync, os.replace

    def record_sync(path: Path) -> None:
        events.append(f"sync {path.relative_to(tmp_path)}")
        sync(path)

    def record_replace(source: Path, target: Path) -> None:
        events.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(atomic, "sync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    folder = temporary_directory(tmp_path, 4)
    folder.mkdir()
    (folder / "tensors.distcp").write_text("weights")
    commit(tmp_path, 4)
    assert sorted(events[:2]) + events[2:] == [
        *sorted(f"sync step_0000004.tmp/{name}" for name in ("manifest.json", "tensors.distcp")),
        "sync step_0000004.tmp",
        "rename step_0000004.tmp step_0000004",
        "sync .",
        f"sync .latest.{os.getpid()}.tmp",
        f"rename .latest.{os.getpid()}.tmp latest",
        "sync .",
    ]


@pytest.mark.parametrize("moment", [0, 1])
def test_a_kill_during_a_commit_leaves_the_one_before(tmp_path, save, monkeypatch, moment):
    """Killed at the rename of the directory, or at that of the pointer."""
    save(4)
    replace, calls = os.replace, []

    def killed(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) > moment:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(8)
    assert (tmp_path / "latest").read_text() == "step_0000004\n"
    assert step_of(find_checkpoint(tmp_path)) == (4 if moment == 0 else 8)


def test_saving_a_step_again_replaces_it(tmp_path, save):
    save(4, "old")
    save(4, "new")
    assert (find_checkpoint(tmp_path) / "tensors.distcp").read_text() == "new 4"
    assert _names(tmp_path) == ["latest", "step_0000004"]


def test_every_way_to_say_where_a_checkpoint_is(tmp_path, save):
    save(4)
    newest = save(8)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copytree(tmp_path / "step_0000004", run_dir / "checkpoints" / "step_0000004")
    assert find_checkpoint(tmp_path) == find_checkpoint(str(newest)) == newest
    assert find_checkpoint(tmp_path / "step_0000004") == step_directory(tmp_path, 4)
    assert find_checkpoint(run_dir) == run_dir / "checkpoints" / "step_0000004"
    assert all(map(holds_checkpoint, (tmp_path, newest, run_dir)))


def test_no_checkpoint_is_an_error_that_says_where_it_looked(tmp_path):
    for path in (tmp_path, tmp_path / "absent", tmp_path / "step_0000004"):
        with pytest.raises(CheckpointError, match=f"no checkpoint in '{path}'"):
            find_checkpoint(path)
        assert not holds_checkpoint(path)


def test_a_damaged_newest_is_named_and_passed_over(tmp_path, save, caplog):
    save(4)
    (save(8) / "tensors.distcp").write_text("other")
    assert find_checkpoint(tmp_path) == step_directory(tmp_path, 4)
    (warning,) = caplog.messages
    assert "step_0000008/tensors.distcp" in warning
    assert "trying the one before it" in warning


def test_a_damaged_step_that_was_asked_for_by_name_is_an_error(tmp_path, save):
    save(4)
    damaged = save(8)
    (damaged / "tensors.distcp").write_text("other")
    with pytest.raises(CheckpointError, match=r"step_0000008/tensors\.distcp.*sha256"):
        find_checkpoint(damaged)


def test_when_all_are_damaged_each_is_named(tmp_path, save):
    for step in (4, 8):
        (save(step) / "tensors.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"no undamaged.*step_0000008/tensors.*step_0000004/tensors"):
        newest_valid(tmp_path)


def test_damaged_ones_after_the_used_one_are_set_aside(tmp_path, save):
    used = save(4)
    save(2)
    for step in (6, 8):
        (save(step) / "tensors.distcp").write_text("other")
    set_aside_newer(used)
    assert _names(tmp_path) == [
        "latest", "step_0000002", "step_0000004", "step_0000006.damaged", "step_0000008.damaged",
    ]  # fmt: skip
    save(5)
    remove_old(tmp_path, keep=2)
    assert list_checkpoints(tmp_path) == [step_directory(tmp_path, 4), step_directory(tmp_path, 5)]


def test_the_newest_are_kept_and_leftovers_removed(tmp_path, save):
    for step in (2, 10, 4):
        save(step)
    temporary_directory(tmp_path, 12).mkdir()
    remove_old(tmp_path, keep=0)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 4, 10]
    assert not temporary_directory(tmp_path, 12).exists()
    remove_old(tmp_path, keep=2)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [4, 10]
