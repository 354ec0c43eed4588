"""Each kind of damage to each file of a real checkpoint: the one before it is found, and loads."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.layout import find_checkpoint, list_checkpoints, remove_old, step_directory
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.errors import CheckpointError
from megatron_rl.run.preflight.starts import checkpoint_problems
from megatron_rl.run.training import TrainingRun
from tests.support.saves import FILES, saving_run, train_a_step
from tests.support.tiny import tiny_config

SUPERVISED = {
    "perform_rl_step": False, "grpo_group_size": False, "grpo_prompts_per_step": False, "global_batch_size": 4,
    "micro_batch_size": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def warnings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure_logging`, called by another test, cuts the library's loggers off from pytest's."""
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)


@pytest.fixture(scope="module")
def pair(one_rank, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainingRun, Path, list[torch.Tensor]]]:
    """A run, its folder with the checkpoints of steps 1 and 2, and the weights of step 1."""
    folder = tmp_path_factory.mktemp("pair")
    run = saving_run(tiny_config(**SUPERVISED), one_rank, folder)
    train_a_step(run)
    run.save(final=True)
    weights = [parameter.detach().clone() for parameter in run.policy.gpt.parameters()]
    train_a_step(run)
    run.save(final=True)
    yield run, folder, weights
    run.closing.close()


@pytest.fixture
def copied(pair, tmp_path: Path) -> Path:
    """A copy of the folder, to be damaged."""
    return shutil.copytree(pair[1], tmp_path / "checkpoints")


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(path.name).randrange(len(data))] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _unreadable(path: Path) -> None:
    """Its first byte is an input error, as that of a broken disk."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def _halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncated, "halved": _halved, "flipped": _flipped, "empty": _empty, "missing": Path.unlink,
    "folder": _folder, "pipe": _pipe, "unreadable": _unreadable,
}  # fmt: skip


def test_the_files_are_all_there_are(pair) -> None:
    assert {path.name for path in (pair[1] / "step_0000002").iterdir()} == set(FILES)


@pytest.mark.each_value
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_the_checkpoint_before_loads_and_the_file_is_named(pair, copied, caplog, file: str, damage: str) -> None:
    if damage == "unreadable" and not Path("/proc/self/mem").exists():
        pytest.skip("this system has no file whose reading fails")
    run, _, weights = pair
    DAMAGES[damage](copied / "step_0000002" / file)
    assert checkpoint_problems(tiny_config(**SUPERVISED, resume=True, run_dir=copied.parent), None) == []
    assert checkpoint_problems(tiny_config(**SUPERVISED, load=str(copied), run_dir=copied / "new"), None) == []
    caplog.clear()
    manager = CheckpointManager(copied, 0, run.groups)
    found = manager.newest()
    assert found == step_directory(copied, 1)
    (warning,) = [line for line in caplog.messages if "trying the one before it" in line]
    assert file in warning and str(copied / "step_0000002") in warning and "\n" not in warning
    assert manager.resume(found, run.policy, run.optimization).step == 1
    assert all(torch.equal(a, b) for a, b in zip(weights, run.policy.gpt.parameters(), strict=True))


def test_every_single_flipped_bit_of_the_manifest_is_found(copied) -> None:
    """It has no checksum of its own: what it says is compared with the files, the name and itself."""
    damaged = copied / "step_0000002" / "manifest.json"
    whole = damaged.read_bytes()
    for place in random.Random(1).sample(range(8 * len(whole)), 200):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        damaged.write_bytes(data)
        if find_checkpoint(copied) != step_directory(copied, 1):
            # The one harmless kind: white space became other white space, and it reads as before.
            assert data.decode().split() == whole.decode().split(), place


@pytest.mark.parametrize("latest", ["nowhere", "empty", "folder", "absent"])
def test_no_resume_needs_the_pointer(pair, copied, latest: str) -> None:
    pointer = copied / "latest"
    pointer.unlink()
    if latest == "folder":
        pointer.mkdir()
    elif latest != "absent":
        pointer.write_text("step_0000099\n" if latest == "nowhere" else "")
    assert CheckpointManager(copied, 0, pair[0].groups).newest() == step_directory(copied, 2)


def test_a_file_in_the_place_of_a_checkpoint_is_damage(pair, copied, caplog) -> None:
    shutil.rmtree(copied / "step_0000002")
    (copied / "step_0000002").write_text("not a folder")
    assert CheckpointManager(copied, 0, pair[0].groups).newest() == step_directory(copied, 1)
    assert str(copied / "step_0000002") in caplog.messages[0]
    assert (copied / "step_0000002.damaged").read_text() == "not a folder"


def test_a_run_whose_only_checkpoint_is_a_file_does_not_start_anew(pair, tmp_path: Path) -> None:
    (tmp_path / "step_0000002").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"no undamaged.*step_0000002.*no directory"):
        CheckpointManager(tmp_path, 0, pair[0].groups).newest()


def test_leftovers_that_are_files_are_removed(copied) -> None:
    (copied / "step_0000003.tmp").write_text("not a folder")
    (copied / ".latest.4242.tmp").write_text("a pointer that a kill left half written")
    remove_old(copied, keep=1)
    assert not list(copied.glob("*.tmp"))
    assert list(copied.glob("step_*")) == list_checkpoints(copied) == [step_directory(copied, 2)]


@pytest.mark.parametrize("name", ["state_rank_00001.safetensors", "__1_0.distcp", "nested/part.pt"])
def test_a_file_of_another_checkpoint_is_damage(copied, caplog, name: str) -> None:
    """Another topology's random states would be loaded without a question."""
    stray = copied / "step_0000002" / name
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("of another")
    assert find_checkpoint(copied) == step_directory(copied, 1)
    assert f"{str(stray)!r} is not in manifest.json" in caplog.text


def test_a_note_beside_the_files_does_no_harm(copied) -> None:
    (copied / "step_0000002" / "README.txt").write_text("the good one")
    assert find_checkpoint(copied) == step_directory(copied, 2)


def test_the_manifest_of_another_step_is_damage(copied, caplog) -> None:
    shutil.copy(copied / "step_0000001" / "manifest.json", copied / "step_0000002")
    assert find_checkpoint(copied) == step_directory(copied, 1)
    assert "step_0000002/manifest.json' is damaged: it is that of step 1" in caplog.text


def test_a_checkpoint_under_the_name_of_another_step_is_damage(copied) -> None:
    """Its run state would say another step than its place in the order."""
    (copied / "step_0000002").rename(copied / "step_0000003")
    assert find_checkpoint(copied) == step_directory(copied, 1)
