"""The output is whole or absent: on errors, on a full disk, on Ctrl-C; what was there before stays."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.hf.quantize import convert, target_format
from megatron_rl.errors import CheckpointError
from megatron_rl.tensor_files import ITEM_BYTES
from tests.unit.export.conftest import read_tensors, write_model, write_tensors

TARGET = target_format("fp8_block", False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in", "llama", shard_size="200KB")


def _nothing_but(tmp_path: Path, *names: str) -> None:
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


class _Disk:
    """``os.pwrite`` that fails after so many calls."""

    def __init__(self, calls: int, failure: BaseException) -> None:
        self.left, self.failure, self.pwrite = calls, failure, os.pwrite

    def __call__(self, handle: int, data: bytes, offset: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.failure
        return self.pwrite(handle, data, offset)


@pytest.mark.parametrize("calls", [0, 1, 20])
def test_a_full_disk_names_the_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    monkeypatch.setattr(os, "pwrite", _Disk(calls, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(CheckpointError, match=r"model-0000\d-of.*safetensors cannot be written \(No space left"):
        convert(source, tmp_path / "out", TARGET)
    _nothing_but(tmp_path, "in")


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("anything")])
def test_an_interruption_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    monkeypatch.setattr(os, "pwrite", _Disk(20, failure))
    with pytest.raises(type(failure)):
        convert(source, tmp_path / "out", TARGET)
    _nothing_but(tmp_path, "in")


def test_short_writes_are_continued(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "whole", TARGET)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: pwrite(handle, data[:1000], offset))
    convert(source, tmp_path / "bits", TARGET)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "bits" / path.name).read_bytes()


def test_while_it_writes_there_is_no_output(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    pwrite = os.pwrite

    def watched(handle: int, data: bytes, offset: int) -> int:
        seen.append((tmp_path / "out").exists())
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    convert(source, tmp_path / "out", TARGET)
    assert seen and not any(seen)
    _nothing_but(tmp_path, "in", "out")


def test_an_output_with_something_in_it_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(source, tmp_path / "out", TARGET)
    with pytest.raises(CheckpointError, match="holds no model"):
        convert(source, tmp_path / "out", TARGET, overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    _nothing_but(tmp_path, "in", "out")


def test_an_empty_output_and_a_deep_one_are_fine(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", TARGET)
    convert(source, tmp_path / "a" / "b" / "out", TARGET)
    assert (tmp_path / "out" / "config.json").is_file()
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()


def test_a_file_as_output_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("file")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="is a file"):
            convert(source, tmp_path / "out", TARGET, overwrite=overwrite)


def test_overwrite_replaces_the_model_as_a_whole(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", TARGET)
    (tmp_path / "out" / "stale.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(source, tmp_path / "out", TARGET)
    convert(source, tmp_path / "out", target_format("int8", False), overwrite=True)
    assert not (tmp_path / "out" / "stale.safetensors").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    _nothing_but(tmp_path, "in", "out")


def test_a_failed_overwrite_keeps_the_old_model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "out", TARGET)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _Disk(20, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", target_format("int8", False), overwrite=True)
    rename = os.replace
    with monkeypatch.context() as patch:  # between the two renames

        def failing(here: Path, there: Path) -> None:
            if here.name == "out.tmp":
                raise OSError(errno.EIO, "disk on fire")
            rename(here, there)

        patch.setattr(os, "replace", failing)
        with pytest.raises(CheckpointError, match="disk on fire"):
            convert(source, tmp_path / "out", target_format("int8", False), overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    _nothing_but(tmp_path, "in", "out")


def test_what_a_killed_conversion_left_is_not_taken_for_a_model(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="another conversion runs or was killed"):
        convert(source, tmp_path / "out", TARGET)
    convert(source, tmp_path / "out", TARGET, overwrite=True)
    _nothing_but(tmp_path, "in", "out")


def test_types_of_every_size_stay_aligned_and_equal(tmp_path: Path) -> None:
    """Loaders view the bytes of a tensor: a scale after an odd number of codes must not be misaligned."""
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(3, 5),
        "model.layers.1.mlp.up_proj.weight": torch.randn(1, 1).bfloat16(),
        "model.norm.weight": torch.randn(7).half(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(3),
        "counter": torch.tensor([7]),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "number": torch.tensor(3.0),
    }
    convert(write_tensors(tmp_path / "in", tensors), tmp_path / "out", TARGET)
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    for entry in header.values():
        assert (8 + length + entry["data_offsets"][0]) % ITEM_BYTES[entry["dtype"]] == 0
    after = read_tensors(tmp_path / "out")
    assert set(after) == {*tensors, *(f"model.layers.{i}.mlp.up_proj.weight_scale_inv" for i in (0, 1))}
    for name in set(tensors) - {f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)}:
        assert torch.equal(after[name], tensors[name]) and after[name].dtype == tensors[name].dtype
