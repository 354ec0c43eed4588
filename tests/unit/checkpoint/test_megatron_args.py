"""A checkpoint of Megatron-LM says what its model is; nothing that the file names is executed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.run_state import architecture_of, architecture_problems
from megatron_rl.config.arguments import read_config
from megatron_rl.families.family import SMALL
from megatron_rl.platform.megatron import common_writer
from tests.support.foreign import args_of, random_policy, write_dist, write_ranks
from tests.support.hugging_face import hf_run, write_model
from tests.support.tiny import tiny_config

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 3, "add_qkv_bias": False}
RUN = ("--perform-rl-step", "--lr", "1e-4", "--train-iters", "1", "--seq-length", "32", "--run-dir", "r")
writes_args = pytest.mark.skipif(common_writer() is None, reason="megatron-core 0.19 writes no common.pt: no args")


def _read(path: Path, *more: str) -> tuple[Any, list[str]]:
    config, problems = read_config([*RUN, "--pretrained-checkpoint", str(path), *more], 1)
    return config, [str(problem) for problem in problems if problem.flag not in ("--langrl-env-config", None)]


@pytest.mark.parametrize("write", [pytest.param(write_dist, marks=writes_args), write_ranks])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize(
    "shape", [{}, {"untie_embeddings_and_output_weights": False}, EXPERTS, EXPERTS | {"moe_layer_freq": "([0,1])"}]
)
def test_its_args_say_what_the_model_is(
    one_rank: object, tmp_path: Path, write: Any, is_named: bool, shape: dict[str, Any]
) -> None:
    wanted = tiny_config(**shape)
    experts = {"moe_router_topk": wanted.model.moe_router_topk}
    experts |= {"moe_layer_freq": [0, 1]} if "moe_layer_freq" in shape else {}
    others = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "words", "norm_epsilon": 1e-7}
    directory = write(tmp_path, random_policy(wanted), args_of(wanted, **others, **experts))
    config, problems = _read(directory if is_named else tmp_path)
    assert not [line for line in problems if "missing" in line and "grpo" not in line]
    assert config.tokenizer.tokenizer_model == "words" and config.model.norm_epsilon == 1e-7
    assert architecture_of(config.architecture()) == architecture_of(wanted.architecture())
    assert architecture_problems(config, directory) == []


@pytest.mark.parametrize(
    ("flag", "value", "means"),
    [
        ("--num-layers", "3", "--num-layers 2"),
        ("--moe-router-topk", "3", "--moe-router-topk 2"),
        ("--window-size", "8", "no --window-size"),
        ("--rotary-seq-len-interpolation-factor", "2.0", "no --rotary-seq-len-interpolation-factor"),
        ("--apply-layernorm-1p", None, "--no-apply-layernorm-1p"),
    ],
)
@pytest.mark.parametrize("write", [pytest.param(write_dist, marks=writes_args), write_ranks])
def test_a_flag_that_disagrees_is_named_with_both_values(
    one_rank: object, tmp_path: Path, write: Any, flag: str, value: str | None, means: str
) -> None:
    """Also one that makes another model of the same tensors."""
    config = tiny_config(**EXPERTS)
    write(tmp_path, random_policy(config), args_of(config))
    _, problems = _read(tmp_path, flag, *([] if value is None else [value]))
    typed = flag if value is None else f"{flag} {value}"
    assert f"{typed} contradicts {tmp_path}, which means {means}; leave the flag out, or take another model" in problems


def test_a_directory_of_hugging_face_that_disagrees_is_named(one_rank: object, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen2", SMALL)
    config = hf_run(tmp_path / "model")
    for freedom, lines in (({"max_position_embeddings": 8, "ffn_hidden_size": 7}, 0), ({"rotary_base": 500}, 1)):
        root = tmp_path / f"run{lines}"
        write_ranks(root, random_policy(config), args_of(config, **freedom))
        _, problems = _read(root, "--hf-config", str(tmp_path / "model"))
        assert len([line for line in problems if f"contradicts {root}, which means --rotary-base 500" in line]) == lines
        assert not [line for line in problems if "contradicts" in line and "rotary-base" not in line]


@pytest.mark.parametrize("args", [None, argparse.Namespace(num_layers="two", hidden_size=True, num_attention_heads=-1)])
def test_what_has_no_args_wants_the_flags(tmp_path: Path, args: argparse.Namespace | None) -> None:
    (tmp_path / "iter_0000001").mkdir()
    torch.save({} if args is None else {"args": args}, tmp_path / "iter_0000001" / "common.pt")
    (line,) = (line for line in _read(tmp_path)[1] if "config.json" in line)
    assert line.startswith(f"--pretrained-checkpoint {tmp_path} does not say what its model is; add --hf-config DIR")
    assert "--num-layers" in line and "--tokenizer-model" in line


class _Command:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("damage", ["hostile", "cut", "no zip", "pipe"])
def test_a_file_that_is_more_than_data_is_not_executed(tmp_path: Path, damage: str) -> None:
    (tmp_path / "iter_0000001").mkdir()
    file = tmp_path / "iter_0000001" / "common.pt"
    args = argparse.Namespace(num_layers=2, more=_Command(str(tmp_path / "executed")))
    torch.save({"args": args}, file, _use_new_zipfile_serialization=damage != "no zip")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:300])
    if damage == "pipe":
        file.unlink()
        os.mkfifo(file)
    config, _ = _read(tmp_path)
    assert config.model.num_layers == (2 if damage == "hostile" else None)
    assert not (tmp_path / "executed").exists()
