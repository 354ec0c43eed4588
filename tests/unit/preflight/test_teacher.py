"""A teacher that cannot teach this policy is one line before a model is built; one that can is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import problem_lines
from megatron_rl.families.family import SMALL
from megatron_rl.run.preflight.models import teacher_problems
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from tests.support.hugging_face import write_model
from tests.support.tiny import tiny_config, write_tokenizer

TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teacher")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(write_tokenizer(folder / "tokenizer")))


@pytest.fixture(scope="module")
def teacher(folder: Path, tokenizer: Tokenizer) -> Path:
    """A model of 24 rows with the policy's tokenizer beside it."""
    write_model(folder / "model", "qwen2", {**SMALL, "vocab_size": 24})
    shutil.copytree(folder / "tokenizer", folder / "model", dirs_exist_ok=True)
    return folder / "model"


def told(config: RLConfig, tokenizer: Tokenizer) -> list[str]:
    return problem_lines(teacher_problems(config, tokenizer))


def config_of(teacher: Path, world_size: int = 1, **changes: Any) -> RLConfig:
    return tiny_config(world_size, rl_teacher_load_hf=teacher, **changes)


def changed(teacher: Path, target: Path, **values: Any) -> Path:
    """A copy with other entries of ``config.json``."""
    shutil.copytree(teacher, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return target


def test_a_teacher_of_the_policys_tokens_is_fine(teacher: Path, tokenizer: Tokenizer) -> None:
    """Qwen2's own tokenizer class adds a token of its own behind the policy's: it is never sampled."""
    assert told(config_of(teacher), tokenizer) == []
    assert teacher_problems(tiny_config(), tokenizer) == []


def test_a_directory_without_a_tokenizer_is_judged_by_its_rows(
    teacher: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    alone = changed(teacher, tmp_path / "alone")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (alone / name).unlink()
    assert told(config_of(alone), tokenizer) == []


def test_fewer_rows_than_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    write_model(folder / "narrow", "qwen2", {**SMALL, "vocab_size": 12})
    (line,) = told(config_of(folder / "narrow"), tokenizer)
    assert line == (
        f"--rl-teacher-load-hf {folder / 'narrow'}: the teacher knows 12 tokens, and tokenizer "
        f"'{folder / 'tokenizer'}' has {TOKENS}; use a teacher with the policy's vocabulary"
    )


def test_another_tokenizer(teacher: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The digits 1 and 2 have changed places."""
    other = changed(teacher, tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    data["model"]["vocab"] |= {"1": 3, "2": 2} if data["model"]["vocab"]["1"] == 2 else {"1": 2, "2": 1}
    (other / "tokenizer.json").write_text(json.dumps(data))
    (line,) = told(config_of(other), tokenizer)
    assert f"--rl-teacher-load-hf {other} has another tokenizer than" in line
    assert "2 of these are others there: '1', id 2, has the id 3; use a teacher of the policy's family" in line


@pytest.mark.parametrize(
    ("changes", "world_size", "reason"),
    [
        ({"tensor_model_parallel_size": 4, "num_query_groups": 4}, 4, "--num-attention-heads 6 is not divisible by"),
        ({"pipeline_model_parallel_size": 2}, 2, "--num-layers 3"),
        ({"seq_length": 96}, 1, "--max-position-embeddings 64; use at most 64"),
    ],
)
def test_a_layout_or_length_that_the_teacher_cannot_have(
    teacher: Path, tokenizer: Tokenizer, tmp_path: Path, changes: dict[str, Any], world_size: int, reason: str
) -> None:
    values = {"num_attention_heads": 6, "num_hidden_layers": 3, "max_position_embeddings": 64, "hidden_size": 48}
    values["layer_types"] = None
    odd = changed(teacher, tmp_path / "odd", **values)
    lines = told(config_of(odd, world_size, **changes), tokenizer)
    assert any(f"--rl-teacher-load-hf {odd}: of this teacher" in line and reason in line for line in lines), lines


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not known here"),
        ({"intermediate_size": 40}, "mlp.gate_proj.weight has shape"),
    ],
)
def test_files_that_are_no_teacher(
    teacher: Path, tokenizer: Tokenizer, tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    (line, *_) = told(config_of(changed(teacher, tmp_path / "bad", **values)), tokenizer)
    assert reason in line
    (line,) = told(config_of(tmp_path / "absent"), tokenizer)
    assert str(tmp_path / "absent") in line
