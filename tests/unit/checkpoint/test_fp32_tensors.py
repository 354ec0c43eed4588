"""Tensors that are published in fp32 beside bf16 weights: A_log of the gated delta rule, a router's bias."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.hf.load import import_hf
from megatron_rl.checkpoint.hf.quantize import convert, target_format
from megatron_rl.checkpoint.hf.save import export_checkpoint
from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.checkpoint.tensors import load
from megatron_rl.families import HfModel, read_model
from megatron_rl.families.family import FAMILIES
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tensor_files import SINGLE_FILE
from tests.support.hugging_face import hf_run, loaded_policy, write_back, write_model

FP32 = ("A_log", "dt_bias", "linear_attn.norm.weight", "e_score_correction_bias")
KINDS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "glm4_moe", "deepseek_v3")


def published(directory: Path, family: str, endings: tuple[str, ...] = FP32) -> HfModel:
    """A bf16 model whose tensors of these names have numbers that bf16 has not."""
    write_model(directory, family, FAMILIES.get(family).examples[0], dtype="bfloat16")
    tensors = load_file(directory / SINGLE_FILE)
    draw = torch.Generator().manual_seed(1)
    for name in tensors:
        if name.endswith(endings):
            tensors[name] = tensors[name].float() + 1e-3 * torch.rand(tensors[name].shape, generator=draw)
    save_file(tensors, directory / SINGLE_FILE, {"format": "pt"})
    return read_model(directory)


def differing(one: Path, other: Path) -> list[str]:
    before, after = (load_file(path / SINGLE_FILE) for path in (one, other))
    assert before.keys() == after.keys()
    return [n for n in before if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_there_and_back_gives_the_same_bits(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = published(tmp_path / "model", family)
    import_hf(model, tmp_path / "ours", dtype, vocab_divisible_by=8)
    export_checkpoint(tmp_path / "ours", model, tmp_path / "back")
    assert differing(tmp_path / "model", tmp_path / "back") == []


@pytest.mark.parametrize(("family", "endings"), [("qwen3_next", FP32), ("llama", ("norm.weight", "lm_head.weight"))])
def test_an_fp32_run_writes_each_tensor_as_it_was_stored(
    one_rank: ParallelGroups, tmp_path: Path, family: str, endings: tuple[str, ...]
) -> None:
    model = published(tmp_path / "model", family, endings)
    policy, _ = loaded_policy(hf_run(model.directory), model.architecture.vocab_size)
    write_back(policy, model, tmp_path / "back")
    assert differing(tmp_path / "model", tmp_path / "back") == []
    write_back(policy, model, tmp_path / "asked", torch.bfloat16)
    written = load_file(tmp_path / "asked" / SINGLE_FILE)
    assert all((tensor.dtype == torch.float32) == name.endswith(FP32) for name, tensor in written.items())
    write_back(policy, model, tmp_path / "wide", torch.float32)
    assert {tensor.dtype for tensor in load_file(tmp_path / "wide" / SINGLE_FILE).values()} == {torch.float32}


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_a_bf16_run_says_what_it_rounds(
    one_rank: ParallelGroups, tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A router's bias is not rounded. From a checkpoint of ours the run has the same numbers."""
    model = published(tmp_path / "model", family)
    config = hf_run(model.directory, bf16=True)
    with caplog.at_level(logging.WARNING):
        policy, _ = loaded_policy(config, model.architecture.vocab_size)
    assert ("A_log and 5 other tensors are fp32 beside bf16 ones; this run rounds" in caplog.text) == (
        family == "qwen3_5_text"
    )
    loaded = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    import_hf(model, tmp_path / "ours", torch.bfloat16, vocab_divisible_by=8)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    load(find_checkpoint(tmp_path / "ours"), policy)
    assert [name for name, own in policy.named_parameters() if not torch.equal(own, loaded[name])] == []
    write_back(policy, model, tmp_path / "back")
    rounded = set(differing(model.directory, tmp_path / "back"))
    assert all(name.endswith(FP32[:3]) for name in rounded) and bool(rounded) == (family == "qwen3_5_text")


def test_an_export_to_8_bits_keeps_them(tmp_path: Path) -> None:
    model = published(tmp_path / "model", "qwen3_5_text")
    convert(model.directory, tmp_path / "out", target_format("fp8_block"))
    before, after = (load_file(path / SINGLE_FILE) for path in (model.directory, tmp_path / "out"))
    kept = [name for name in before if name.endswith(FP32)]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
