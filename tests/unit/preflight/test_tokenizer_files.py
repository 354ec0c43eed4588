"""Tokenizer directories that cannot be loaded: one line each, whatever transformers raises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.preflight.text import tokenizer_problems
from tests.support.tiny import tiny_config, write_tokenizer

DEEP = "[" * 20_000 + "]" * 20_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _problems(directory: Path) -> list[str]:
    return tokenizer_problems(tiny_config(tokenizer_model=directory))[1]


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


def test_the_whole_one_is_fine(tokenizer: Path) -> None:
    assert _problems(tokenizer) == []
