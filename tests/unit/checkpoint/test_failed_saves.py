"""The disk fails at each write of a save in turn: the checkpoint before it stays, and the next save succeeds."""

from __future__ import annotations

import errno
import logging
import multiprocessing.synchronize
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checkpoint import manager
from megatron_rl.checkpoint.layout import find_checkpoint, list_checkpoints, step_directory
from megatron_rl.errors import SaveError
from megatron_rl.platform import megatron
from megatron_rl.run.training import TrainingRun
from tests.support.saves import COMMON, FILES, before_tensors, full_disk, saving_run, train_a_step
from tests.support.tiny import tiny_config
from tests.unit.checkpoint.test_damage import SUPERVISED


@pytest.fixture(autouse=True)
def warnings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure_logging`, called by another test, cuts the library's loggers off from pytest's."""
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)


@pytest.fixture(scope="module")
def trained(one_rank, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainingRun, Path]]:
    """A run after two steps, and a folder with the checkpoint of the first."""
    folder = tmp_path_factory.mktemp("first")
    run = saving_run(tiny_config(**SUPERVISED), one_rank, folder)
    train_a_step(run)
    run.save(final=True)
    train_a_step(run)
    yield run, folder
    run.closing.close()


@pytest.fixture
def run(trained, tmp_path: Path) -> TrainingRun:
    """It saves into a copy of the folder: ``tmp_path / "checkpoints"``."""
    run, folder = trained
    shutil.copytree(folder, tmp_path / "checkpoints")
    run.checkpoints = manager.CheckpointManager(tmp_path / "checkpoints", 0, run.groups)
    return run


def _fails(run: TrainingRun, folder: Path) -> str:
    """Save; the message of the failure, after all that must hold whatever fails."""
    with pytest.raises(SaveError) as caught:
        run.save(final=True)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder / "step_0000002") in message
    assert "--save a directory on another disk" in message
    assert find_checkpoint(folder) == step_directory(folder, 1)
    assert not list(folder.glob("*.tmp")), "what was written keeps the disk full"
    assert (folder / "latest").read_text() == "step_0000001\n"
    return message


def _with_limit(size: int, write: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel lets no file of this process and its children grow beyond ``size`` bytes meanwhile."""

    def limited(*given: Any, **named: Any) -> Any:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            return write(*given, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def as_on_cuda(patch: pytest.MonkeyPatch) -> None:
    """Saves fork nothing; those in the background are written in a thread."""
    original = manager.BackgroundSave
    patch.setattr(manager, "BackgroundSave", lambda *given: original(*given[:3], on_cuda=True))
    patch.setattr(megatron, "must_write_in_process", lambda: megatron.VERSION < (0, 17))


def _succeeds(run: TrainingRun, folder: Path) -> None:
    run.save(final=True)
    assert find_checkpoint(folder) == step_directory(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_0000001", "step_0000002"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("file", FILES)
def test_a_disk_that_is_full_at_each_file(run: TrainingRun, tmp_path: Path, file: str) -> None:
    folder = tmp_path / "checkpoints"
    if file.endswith(".safetensors"):  # written under another name and renamed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager, "save_rank_state", _with_limit(0, manager.save_rank_state))
            message = _fails(run, folder)
        assert os.strerror(errno.EFBIG) in message
    else:
        with before_tensors(lambda folder: full_disk(folder, file)):
            message = _fails(run, folder)
        assert os.strerror(errno.ENOSPC) in message
    assert "free space there" in message
    assert run.checkpoints.failed_saves == 1
    _succeeds(run, folder)


def test_a_limit_that_grows_until_the_save_succeeds(run: TrainingRun, tmp_path: Path) -> None:
    """In the midst of the large files, which processes of their own write."""
    folder = tmp_path / "checkpoints"
    largest = max(path.stat().st_size for path in (folder / "step_0000001").iterdir())
    limits = [0, 1, 1000, largest // 2, largest - 1]
    save = run.checkpoints.save
    for limit in limits:
        run.checkpoints.save = _with_limit(limit, save)
        assert "free space there" in _fails(run, folder), limit
    run.checkpoints.save = save
    assert run.checkpoints.failed_saves == len(limits)
    _succeeds(run, folder)


class _FailingCalls:
    """The ``nth`` of all calls it stands before raises ENOSPC."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.calls = 0

    def before(self, function: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*given, **named)

        return called

    def put_before_all(self, patch: pytest.MonkeyPatch) -> None:
        """Before whatever of this process makes, syncs or renames something in a save."""
        patch.setattr(os, "fsync", self.before(os.fsync))
        patch.setattr(os, "replace", self.before(os.replace))
        patch.setattr(Path, "write_text", self.before(Path.write_text))
        patch.setattr(Path, "write_bytes", self.before(Path.write_bytes))
        for name in ("remove", "save_rank_state"):
            patch.setattr(manager, name, self.before(getattr(manager, name)))


def test_the_nth_call_fails_for_every_n(run: TrainingRun, tmp_path: Path) -> None:
    """Up to the moment at which the checkpoint counts, a failure is one; after it, the pointer alone is old."""
    folder = tmp_path / "checkpoints"
    counted = 0
    for nth in range(1, 100):
        calls = _FailingCalls(nth)
        with pytest.MonkeyPatch.context() as patch:
            calls.put_before_all(patch)
            failures = run.checkpoints.failed_saves
            try:
                run.save(final=True)
            except SaveError as error:
                assert "No space left on device" in str(error)
                assert run.checkpoints.failed_saves == failures + 1
            else:
                counted += 1
        valid = find_checkpoint(folder)
        assert not list(folder.glob("step_*.tmp"))
        if valid == step_directory(folder, 2):
            shutil.rmtree(valid)
            run.checkpoints = manager.CheckpointManager(folder, 0, run.groups)
        assert list_checkpoints(folder) == [step_directory(folder, 1)]
        if calls.calls < nth:
            break
    assert nth >= 20, "the calls were not counted"
    assert counted == 1 + 4  # the last one, and those whose pointer failed: written, synced, renamed, synced
    assert valid == step_directory(folder, 2)


def test_a_step_that_is_saved_again_is_not_lost_when_the_rename_fails(run: TrainingRun, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run.save(final=True)
    run.checkpoints = manager.CheckpointManager(folder, 0, run.groups)
    replace, calls = os.replace, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", second_fails)
        with pytest.raises(SaveError):
            run.save(final=True)
    _succeeds(run, folder)
    assert len(calls) == 3


def test_a_folder_named_latest_costs_a_warning(run, tmp_path: Path, caplog) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    run.save(final=True)
    assert find_checkpoint(folder) == step_directory(folder, 2)
    assert f"{folder / 'latest'} does not name step_0000002" in caplog.text
    assert run.checkpoints.failed_saves == 0


def test_files_in_the_way_of_a_save_are_removed(run: TrainingRun, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "step_0000002").write_text("not a folder")
    (folder / "step_0000002.tmp").write_text("not a folder")
    _succeeds(run, folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_periodic_save_that_fails_is_a_warning_and_keeps_the_journal(run, tmp_path, caplog, monkeypatch) -> None:
    committed: list[int] = []
    monkeypatch.setattr(run, "committed", committed.append)
    with before_tensors(lambda folder: full_disk(folder, "run_state.json")):
        run.save(final=False)
    assert committed == []
    (warning,) = [line for line in caplog.messages if line.startswith("NOT SAVED")]
    assert warning.endswith("the run goes on")
    run.save(final=False)
    assert committed == [2]
    assert find_checkpoint(tmp_path / "checkpoints") == step_directory(tmp_path / "checkpoints", 2)


@pytest.mark.each_value
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("file", [*COMMON, "__0_0.distcp", "metadata.json", ".metadata", "manifest.json"])
@pytest.mark.parametrize(("seen_by", "writer"), [("poll", "fork"), ("the next save", "fork"), ("poll", "thread")])
def test_a_save_in_the_background_that_fails(
    run: TrainingRun, tmp_path: Path, file: str, seen_by: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted and told; training goes on, and the same step can be saved again."""
    folder = tmp_path / "checkpoints"
    if writer == "thread":
        as_on_cuda(monkeypatch)
    monkeypatch.setattr(run, "config", replace(run.config, checkpoint=replace(run.config.checkpoint, async_save=True)))
    with before_tensors(lambda folder: full_disk(folder, file)):
        run.save(final=False)  # a failure before the fork is told at once, and is no error either
    deadline = time.monotonic() + 60
    while seen_by == "poll" and run.checkpoints.failed_saves == 0 and file != "manifest.json":
        run.checkpoints.poll()
        assert time.monotonic() < deadline
    if seen_by == "poll" and file != "manifest.json":
        assert find_checkpoint(folder) == step_directory(folder, 1)
        assert not list(folder.glob("*.tmp"))
    run.save(final=True)
    assert run.checkpoints.failed_saves == 1
    assert find_checkpoint(folder) == step_directory(folder, 2)


@pytest.mark.skipif(megatron.VERSION >= (0, 17), reason="its writers are threads")
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_shared_memory_that_cannot_be_written_is_named(
    run: TrainingRun, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's error for a lock between processes names no file; the checkpoint's disk is well."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.synchronize, "SemLock", type("SemLock", (), {"__init__": refused}))
        with pytest.raises(SaveError) as caught:
            run.save(final=True)
    message = str(caught.value)
    assert "\n" not in message and "the checkpoints before it are as they were" in message
    assert f"/dev/shm has no room for a lock ({os.strerror(number)})" in message and "another disk" not in message
