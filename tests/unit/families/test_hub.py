"""Names of the hub in place of directories, out of huggingface_hub's cache: nothing here asks the network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.cli.train import check
from megatron_rl.config.arguments import read_config
from megatron_rl.errors import ConfigError
from megatron_rl.families import model_directory, read_model
from megatron_rl.families.family import SMALL
from megatron_rl.run.preflight.inputs import hugging_face_problems
from megatron_rl.run.preflight.models import teacher_problems
from megatron_rl.run.preflight.starts import first_weights
from tests.support.forks import run_python
from tests.support.hugging_face import write_model


@pytest.fixture
def name(tmp_path) -> str:
    """Another in each test: a process fetches a name once."""
    return f"somebody/{tmp_path.name}"


@pytest.fixture
def cached(tmp_path, monkeypatch, name) -> Path:
    """Where the cache of the hub has the model of that name; without a network."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    write_model(snapshot, "qwen2", SMALL)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def config_of(*argv):
    return read_config(["--perform-rl-step", *argv], 1)


def test_a_name_is_what_the_cache_has(cached, name):
    assert read_model(name).directory == model_directory(name, weights=True) == cached
    config, problems = config_of("--load-hf", name)
    assert not any(name in str(problem) for problem in problems)
    assert config.model.hidden_size == SMALL["hidden_size"]
    assert config.checkpoint.load_hf == name, "what the user typed stays"
    assert first_weights(config)[1].path == str(cached)
    assert list(hugging_face_problems(config, None)) == []


def test_its_weights_are_checked_as_those_of_a_directory(cached, name):
    (cached / "model.safetensors").unlink()
    config, _ = config_of("--load-hf", name)
    [problem] = hugging_face_problems(config, None)
    assert str(problem).startswith(f"--load-hf: {cached}")


def test_a_teacher_may_be_a_name_too(cached, name):
    config, _ = config_of("--load-hf", name, "--rl-teacher-load-hf", name)
    assert config.wants_teacher
    assert teacher_problems(config, None) == []
    (cached / "model.safetensors").unlink()
    [problem] = teacher_problems(config, None)
    assert str(problem).startswith(f"--rl-teacher-load-hf: {cached}")


def test_a_directory_of_that_name_comes_first(cached, name):
    shutil.copytree(cached, name)
    assert read_model(name).directory == Path(name)


@pytest.mark.parametrize("other", ["somebody/another", "runs/model"])
def test_a_name_that_nobody_has_is_one_line(cached, other):
    _, problems = config_of("--load-hf", other)
    [line] = [str(problem) for problem in problems if other in str(problem)]
    assert line.startswith(f"--load-hf: {other} is no directory here, and cannot be had from the Hugging Face hub (")
    assert line.endswith("give a directory, or a name that the hub or its cache has") and "\n" not in line


def test_it_does_not_hide_what_else_is_wrong(cached, capsys):
    flags = ["--load-hf", "somebody/another", "--perform-rl-step", "--langrl-env-config", "absent.yaml"]
    assert check(flags) == 2
    told = capsys.readouterr().err
    assert told.count("somebody/another is no directory here") == 1
    assert "--lr is missing" in told and "absent.yaml" in told


NAME = "somebody/a-model"
RANK_1 = """
import sys
import huggingface_hub
from megatron_rl import main

def snapshot_download(name, allow_patterns):
    if sys.argv[1] in allow_patterns:
        raise OSError(28, "No space left on device")
    return sys.argv[2]

huggingface_hub.snapshot_download = snapshot_download
main.PATIENCE_WITH_RANK_0_S = 0.1
sys.exit(main.main(["train_rl.py", *sys.argv[3:]]))
"""


@pytest.mark.parametrize("missing", ["*.json", "*.safetensors"], ids=["settings", "weights"])
def test_a_rank_whose_download_fails_alone_says_so(missing, tmp_path):
    """As torchrun starts rank 1; rank 0, which has the files, is not needed to see it."""
    write_model(tmp_path / "model", "qwen2", SMALL)
    flags = ["--load-hf", NAME, "--perform-rl-step", "--langrl-env-config", "list.yaml", "--run-dir", "run"]
    flags += ["--grpo-prompts-per-step", "2", "--grpo-group-size", "2", "--seq-length", "16", "--lr", "1e-3"]
    flags += ["--train-iters", "1", "--tokenizer-model", "nowhere"]
    ended = run_python(
        "-c", RANK_1, missing, tmp_path / "model", *flags, cwd=tmp_path,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert "problem(s) in the configuration, on rank 1 (" in ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if "No space left on device" in line]
    assert f"{NAME} is no directory here, and cannot be had from the Hugging Face hub (" in line


@pytest.mark.parametrize("path", ["model", "a/b/c", "./a", "../a", "/a/b", "~/a", "a/b/"])
def test_what_is_a_path_is_never_asked_for(cached, path):
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        read_model(path)
