"""Tokenizer directories that cannot be loaded: one line each, whatever transformers raises."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.run.preflight.inputs import tokenizer_problems
from megatron_rl.tokenizer import load_tokenizer
from tests.support.tiny import tiny_config, write_tokenizer

DEEP = "[" * 20_000 + "]" * 20_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _problems(directory: Path) -> list[str]:
    return [problem.text for problem in tokenizer_problems(tiny_config(tokenizer_model=directory))[1]]


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("tokenizer_config.json", "[]", "tokenizer_config.json is [] where a mapping of settings belongs"),
        ("tokenizer_config.json", "3", "tokenizer_config.json is 3 where"),
        ("tokenizer_config.json", DEEP, "tokenizer_config.json is not JSON (it is nested too deeply)"),
        ("tokenizer_config.json", json.dumps({"tokenizer_class": 3}), "cannot be loaded"),
        ("tokenizer.json", DEEP, "cannot be loaded"),
        ("tokenizer.json", "[]", "cannot be loaded"),
        ("special_tokens_map.json", DEEP, "cannot be loaded"),
        ("added_tokens.json", "[1]", "cannot be loaded"),
    ],
    ids=["list", "number", "deep", "class", "deep tokenizer", "tokenizer list", "deep map", "added tokens"],
)
def test_files_that_are_no_tokenizer(tokenizer: Path, tmp_path: Path, file: str, text: str, reason: str) -> None:
    directory = shutil.copytree(tokenizer, tmp_path / "bad")
    (directory / file).write_text(text)
    (line,) = _problems(directory)
    assert line.startswith(f"--tokenizer-model '{directory}'")
    assert reason in line and "\n" not in line and len(line) < 700


def _with_vocabulary(tokenizer: Path, directory: Path, vocabulary: dict[str, int]) -> Path:
    shutil.copytree(tokenizer, directory)
    data = json.loads((directory / "tokenizer.json").read_text())
    data["model"]["vocab"] = vocabulary
    (directory / "tokenizer.json").write_text(json.dumps(data))
    return directory


def test_ids_with_holes_all_have_rows(tokenizer: Path, tmp_path: Path) -> None:
    found = load_tokenizer(str(_with_vocabulary(tokenizer, tmp_path / "holes", {"3": 3, "4": 900})))
    assert found.encode("4") == [900]
    assert found.vocab_size == 901


def test_an_id_beyond_any_vocabulary(tokenizer: Path, tmp_path: Path) -> None:
    (line,) = _problems(_with_vocabulary(tokenizer, tmp_path / "far", {"3": 3, "4": 2**32 - 1}))
    assert "has the token id 4,294,967,295, and no vocabulary is that large" in line


def test_a_text_that_has_no_tokens(tokenizer: Path, tmp_path: Path) -> None:
    found = load_tokenizer(str(_with_vocabulary(tokenizer, tmp_path / "few", {"3": 3})))
    assert found.encode("3") == [3]
    with pytest.raises(ConfigError, match=r"cannot encode '3\+4=' \(.*\); use one whose vocabulary covers"):
        found.encode("3+4=")


def test_the_whole_one_is_fine(tokenizer: Path) -> None:
    assert _problems(tokenizer) == []


@pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json"])
def test_a_pipe_is_not_waited_for(tokenizer: Path, tmp_path: Path, name: str) -> None:
    directory = shutil.copytree(tokenizer, tmp_path / "pipe")
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    (line,) = _problems(directory)
    assert f"cannot be loaded ({name} is a device, a pipe or a broken link, not a file)" in line


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_directory_without_a_vocabulary_is_refused(tmp_path: Path, kind: str) -> None:
    """transformers makes a tokenizer of no files, to which every text is empty."""
    settings = {"tokenizer_class": f"{kind.capitalize()}Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"cannot be loaded \(.*tokenizer\.json") as refused:
        load_tokenizer(str(tmp_path))
    assert len(refused.value.lines) == 1
