"""The converter: Hugging Face to ours, a run from it on two ranks, and what the run saved back to Hugging Face."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint.hf.load import fill
from megatron_rl.families import ModelLayout, read_model
from megatron_rl.families.family import SMALL
from megatron_rl.tensor_files import TensorReader
from tests.e2e.test_hugging_face import SHAPE_FLAGS
from tests.support.forks import run_python
from tests.support.hugging_face import write_model
from tests.support.runs import run

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def model(workshop) -> Path:
    directory = workshop.folder / "model"
    write_model(directory, "qwen3_moe", {**SMALL, **EXPERTS, "vocab_size": 20})
    return directory


def _convert(*options: object) -> subprocess.CompletedProcess[str]:
    return run_python("tools/checkpoint/convert.py", "--model-type", "GPT", *options)


def _to_core(source: Path, target: Path, *options: object) -> subprocess.CompletedProcess[str]:
    loader = ("--loader", "llama_mistral", "--checkpoint-type", "hf", "--saver", "core")
    return _convert(*loader, "--load-dir", source, "--save-dir", target, *options)


def _to_hf(source: Path, target: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return _convert("--loader", "core", "--saver", "hf", "--load-dir", source, "--save-dir", target, *options)


def test_there_and_back_through_a_run_on_two_ranks(workshop, model) -> None:
    ours, back, trained = (workshop.folder / name for name in ("ours", "back", "trained"))
    sizes = ("--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 1)
    sizes += ("--make-vocab-size-divisible-by", 8)
    result = _to_core(model, ours, "--tokenizer-model", workshop.tokenizer, "--model-size", "qwen3-30B", *sizes)
    assert result.returncode == 0, result.stderr
    result = _to_hf(ours, back, "--hf-config", model)
    assert result.returncode == 0, result.stderr
    before, after = load_file(model / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    flags = dict.fromkeys(SHAPE_FLAGS) | {"hf_config": model, "tokenizer_model": workshop.tokenizer}
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    argv = workshop.rl("converted", **flags, **parallel, pretrained_checkpoint=ours, train_iters=2)
    assert "weights from" in run(argv, ranks=2).check().output
    result = _to_hf(workshop.run_dir("converted"), trained, "--bf16")
    assert result.returncode == 0, result.stderr
    moved = load_file(trained / "model.safetensors")
    assert {tensor.dtype for tensor in moved.values()} == {torch.bfloat16}
    change = [(moved[name].float() - before[name]).abs().max().item() for name in before]
    assert 1e-3 < max(change) < 0.2, "two updates of a learning rate of 0.01"


def test_what_cannot_be_converted_is_one_line(workshop, model) -> None:
    target = workshop.folder / "never"
    cases = [
        (_to_core(workshop.folder, target), "config.json cannot be read"),
        (_to_core(model, target, "--model-size", "llama3"), "--model-size llama3 contradicts"),
        (_to_hf(model, target, "--hf-config", model), "no checkpoint in"),
        (_to_hf(model, target), "no checkpoint in"),
    ]
    for result, text in cases:
        assert result.returncode == 2
        lines = [line for line in result.stderr.splitlines() if "Megatron" not in line]
        assert len(lines) == 1 and text in lines[0], result.stderr
    assert not target.exists()


def test_a_run_on_two_ranks_takes_megatrons_format_torch_and_converts_it_once(workshop, model, monkeypatch) -> None:
    """Shape and tokenizer come from its args."""
    monkeypatch.setenv("HF_HOME", str(workshop.folder / "cache"))
    source, tensors = read_model(model), {}
    with TensorReader(model) as reader:
        for parameter in ModelLayout.of(source.architecture).parameters:
            tensors[parameter.name] = torch.empty(parameter.shape)
            fill(tensors[parameter.name], source.weights[parameter.name].pieces(parameter), reader)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(workshop.tokenizer)}
    args = Namespace(**source.architecture.settings(), group_query_attention=True, **tokenizer)
    directory = workshop.folder / "megatron" / "iter_0000003"
    (directory / "mp_rank_00").mkdir(parents=True)
    torch.save({"model": tensors, "args": args}, directory / "mp_rank_00" / "model_optim_rng.pt")

    flags = dict.fromkeys(SHAPE_FLAGS) | {"tokenizer_model": None, "pretrained_checkpoint": directory}
    flags |= {"tensor_model_parallel_size": 2, "sequence_parallel": True, "train_iters": 1}
    output = run(workshop.rl("torch", **flags), ranks=2).check().output
    assert output.count("of Megatron-LM's format torch into") == 1
    assert f"weights from {directory}, written by Megatron-LM" in output
