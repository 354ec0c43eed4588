"""`convert_torch_dist_to_hf.py`: what it writes, and its one-line errors."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint.hf.load import import_hf
from megatron_rl.checkpoint.layout import write_manifest
from megatron_rl.checkpoint.run_state import StartingWeights, read_run_state, write_run_state
from megatron_rl.families import read_model
from megatron_rl.families.family import SMALL
from tests.support.hugging_face import write_model
from tests.support.ranks import REPOSITORY

Script = Callable[..., int]


@pytest.fixture(scope="module")
def script() -> Script:
    path = Path(REPOSITORY) / "tools" / "checkpoint" / "convert_torch_dist_to_hf.py"
    specification = importlib.util.spec_from_file_location("convert_torch_dist_to_hf", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    def run(source: Path, target: Path, origin: Path | None = None) -> int:
        options = {"--input-dir": source, "--output-dir": target} | ({"--origin-hf-dir": origin} if origin else {})
        return module.main([str(word) for pair in options.items() for word in pair])

    return run


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    write_model(tmp_path / "origin", "qwen2", SMALL)
    return tmp_path / "origin"


@pytest.fixture
def saved(tmp_path: Path, origin: Path) -> Path:
    import_hf(read_model(origin), tmp_path / "run" / "checkpoints", torch.float32, 128)
    return tmp_path / "run"


def test_it_writes_the_bits_that_were_saved(script, tmp_path, origin, saved) -> None:
    assert script(saved, tmp_path / "out", origin) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (origin, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "config.json").read_bytes() == (origin / "config.json").read_bytes()


def began_with(saved: Path, folder: Path, origin: StartingWeights | None, hf_directory: str = "") -> Path:
    """The same checkpoint as of a run that began with ``origin``, and has its shape from ``hf_directory``."""
    shutil.copytree(saved, folder)
    step = folder / "checkpoints" / "step_0000000"
    state = read_run_state(step)
    write_run_state(step, replace(state, origin=origin, model=replace(state.model, hf_directory=hf_directory)))
    (step / "manifest.json").unlink()
    write_manifest(step, 0)
    return folder


def test_a_checkpoint_knows_where_its_model_came_from(script, tmp_path, origin, saved, capsys) -> None:
    step = saved / "checkpoints" / "step_0000000"
    later = began_with(saved, tmp_path / "later", StartingWeights.at("checkpoint", str(step)))
    shaped = began_with(saved, tmp_path / "shaped", StartingWeights("drawn"), str(origin))
    for source, out in ((saved, "out"), (later, "out_later"), (shaped, "out_shaped")):
        assert script(source, tmp_path / out) == 0
        assert (tmp_path / out / "config.json").read_bytes() == (origin / "config.json").read_bytes()
    drawn = began_with(saved, tmp_path / "drawn", StartingWeights("drawn"))
    older = began_with(saved, tmp_path / "older", None)
    itself = StartingWeights.at("checkpoint", str(tmp_path / "circle" / "checkpoints" / "step_0000000"))
    circle = began_with(saved, tmp_path / "circle", itself)
    for source in (drawn, older, circle):
        capsys.readouterr()
        assert script(source, tmp_path / "none") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "does not say which Hugging Face directory its model came from; name a directory" in line
        assert line.endswith("as --origin-hf-dir DIR")
    origin.rename(tmp_path / "moved")
    capsys.readouterr()
    assert script(later, tmp_path / "none") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "came from what is gone" in line and "origin/config.json cannot be read" in line
    assert script(later, tmp_path / "named", tmp_path / "moved") == 0


def test_an_origin_of_another_shape_names_key_and_both_values(script, tmp_path, saved, capsys) -> None:
    write_model(tmp_path / "other", "qwen2", {**SMALL, "intermediate_size": 2 * SMALL["intermediate_size"]})
    capsys.readouterr()
    assert script(saved, tmp_path / "out", tmp_path / "other") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"ffn_hidden_size {SMALL['intermediate_size']}, " in line
    assert f"means {2 * SMALL['intermediate_size']}" in line
    assert not (tmp_path / "out").exists()


def test_one_line_for_what_is_not_there_or_is_there_already(script, tmp_path, origin, saved, capsys) -> None:
    (tmp_path / "taken").mkdir()
    cases = [
        (origin, "out", origin, "no checkpoint in"),
        (saved, "out", tmp_path / "taken", "config.json cannot be read"),
        (saved, "taken", origin, "exists; choose another directory"),
    ]
    capsys.readouterr()
    for source, target, model, text in cases:
        assert script(source, tmp_path / target, model) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert text in line
    assert os.listdir(tmp_path / "taken") == []
    assert not (tmp_path / "out").exists()


def test_what_an_interrupted_run_leaves_does_not_have_the_name(script, tmp_path, origin, saved, monkeypatch) -> None:
    from megatron_rl.checkpoint.hf import save

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save, "_write_config", full)
        assert script(saved, tmp_path / "out", origin) == 2
    assert not (tmp_path / "out").exists()
    assert script(saved, tmp_path / "out", origin) == 0
