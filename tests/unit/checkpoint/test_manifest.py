"""Every kind of damage is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.checkpoint.layout import MANIFEST, verify, write_manifest
from megatron_rl.errors import CheckpointError


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, "sha256 differs"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "sha256 differs"),
        (lambda path: path.write_bytes(b""), "sha256 differs"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["flipped bit", "truncated", "emptied", "removed"],
)
def test_a_damaged_file_is_named(save, damage, message):
    path = save(4) / "tensors.distcp"
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify(path.parent)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', "{}", pytest.param("[" * 20_000, id="deep")])
def test_an_unreadable_manifest_is_damage(save, text):
    directory = save(4)
    (directory / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="no readable manifest"):
        verify(directory)


def test_the_quick_look_sees_what_is_missing_and_reads_no_tensors(save):
    directory = save(4)
    _flip(directory / "tensors.distcp")
    verify(directory, contents=False)
    (directory / "tensors.distcp").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        verify(directory, contents=False)
    directory = save(5)
    _flip(directory / "run_state.json")
    with pytest.raises(CheckpointError, match="run_state.json' is damaged"):
        verify(directory, contents=False)


def test_files_in_folders_are_covered(tmp_path, save):
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "part.bin").write_text("data")
    write_manifest(tmp_path, 1)
    verify(tmp_path)
    _flip(tmp_path / "nested" / "part.bin")
    with pytest.raises(CheckpointError, match=r"nested/part\.bin"):
        verify(tmp_path)
