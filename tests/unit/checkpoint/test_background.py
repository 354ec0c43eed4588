"""A save in the background: nothing waits for it until something must."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_rl.checkpoint.layout import best_checkpoint, commit, remove_old, temporary_directory
from megatron_rl.checkpoint.saving import BackgroundSave, SaveAttempt
from megatron_rl.errors import SaveError
from megatron_rl.platform.groups import ParallelGroups


def wait_for(path: Path, buckets: object, results: list[object]) -> None:
    """What the forked writer, or the thread, does here."""
    while not path.exists():
        time.sleep(0.005)
    results.append(buckets)


def begun(
    go: Path, done: list[str], commit=None, on_cuda: bool = False, buckets=(), results: list[object] | None = None
) -> BackgroundSave:
    given = (go, buckets, [] if results is None else results)
    request = AsyncRequest(wait_for, given, [lambda: done.append("written")], preload_fn=lambda: list(buckets))
    attempt = SaveAttempt(go.parent / "step_0000007.tmp", is_main=True)
    return BackgroundSave(request, attempt, commit or (lambda: done.append("committed")), on_cuda)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_polls_do_not_wait_and_finish_does(one_rank: ParallelGroups, tmp_path: Path, on_cuda: bool) -> None:
    go, done = tmp_path / "go", []
    save = begun(go, done, on_cuda=on_cuda)
    for _ in range(3):
        save.go_on(wait=False)
    assert done == []
    go.touch()
    save.go_on(wait=True)
    assert done == ["written", "committed"]


def test_a_poll_commits_once_everything_is_written(one_rank: ParallelGroups, tmp_path: Path) -> None:
    go, done = tmp_path / "go", []
    go.touch()
    save = begun(go, done)
    deadline = time.monotonic() + 30
    while done != ["written", "committed"]:
        save.go_on(wait=False)
        assert time.monotonic() < deadline
    save.go_on(wait=True)
    assert done == ["written", "committed"]


def test_a_commit_that_fails_is_told_at_the_end(one_rank: ParallelGroups, tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "manifest.json")

    (tmp_path / "go").touch()
    save = begun(tmp_path / "go", [], full)
    with pytest.raises(SaveError, match="step_0000007.tmp' could not be written .*No space left on device: 'manifest"):
        save.go_on(wait=True)


def test_a_process_that_uses_cuda_forks_no_writer_and_trains_on(one_rank: ParallelGroups, tmp_path: Path) -> None:
    """The thread writes the weights as they were, those on the host too, which nobody has copied there."""
    weight, written, before = torch.ones(3), [], multiprocessing.active_children()
    bucket = ("__0_0.distcp", "key", (["an object"], [("item", weight)]))
    save = begun(tmp_path / "go", [], on_cuda=True, buckets=[bucket], results=written)
    assert multiprocessing.active_children() == before
    weight.zero_()
    (tmp_path / "go").touch()
    save.go_on(wait=True)
    (((file, key, (objects, ((item, kept),))),),) = written
    assert (file, key, objects, item) == ("__0_0.distcp", "key", ["an object"], "item")
    assert torch.equal(kept, torch.ones(3))


def test_an_abandoned_thread_does_not_keep_the_process(one_rank: ParallelGroups, tmp_path: Path) -> None:
    save = begun(tmp_path / "go", [], on_cuda=True)
    (writer,) = (thread for thread in threading.enumerate() if thread.name == "write checkpoint")
    save.abandon()
    assert writer.daemon and writer.is_alive()
    (tmp_path / "go").touch()
    writer.join(30)
    assert not writer.is_alive()


def test_an_abandoned_save_ends_its_writer(one_rank: ParallelGroups, tmp_path: Path) -> None:
    done, before = [], multiprocessing.active_children()
    save = begun(tmp_path / "never", done)
    (writer,) = (child.pid for child in multiprocessing.active_children() if child not in before)
    save.abandon()
    assert done == []
    with pytest.raises(ProcessLookupError):
        os.kill(writer, 0)


def committed(root: Path, step: int, is_best: bool = False) -> Path:
    written = temporary_directory(root, step, "a1")
    written.mkdir(parents=True)
    (written / "data").write_text(str(step))
    return commit(root, step, "a1", is_best)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        committed(tmp_path, step, is_best=step in (1, 2))
        remove_old(tmp_path, keep=2)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert kept == ["step_0000002", "step_0000004", "step_0000005"]
    assert best_checkpoint(tmp_path) == tmp_path / "step_0000002"


@pytest.mark.parametrize("text", ["", "step_0000009\n", "../elsewhere\n", "\0"])
def test_a_best_that_points_nowhere_is_none(tmp_path: Path, text: str) -> None:
    committed(tmp_path, 1)
    (tmp_path / "best").write_text(text)
    assert best_checkpoint(tmp_path) is None
    remove_old(tmp_path, keep=1)
