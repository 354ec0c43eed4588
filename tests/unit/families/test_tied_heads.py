"""A tied `config.json` beside files that hold a head: transformers 5 uses that head unless it is the embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl.families import read_model, weight_problems
from megatron_rl.families.family import FAMILIES, SMALL
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tensor_files import INDEX_FILE, SINGLE_FILE
from tests.support.hugging_face import batch_of, hf_run, loaded_policy, packed_logits, reference_logits, write_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {"qwen2": {**SMALL, "tie_word_embeddings": True}, "gemma3_text": FAMILIES.get("gemma3_text").examples[1]}


def rewritten(directory: Path, **tensors: torch.Tensor | None) -> None:
    held = load_file(directory / SINGLE_FILE)
    for name, tensor in tensors.items():
        held.pop(name, None)
        held |= {} if tensor is None else {name: tensor.contiguous()}
    save_file(held, directory / SINGLE_FILE, {"format": "pt"})


def in_two_files(directory: Path) -> None:
    held = load_file(directory / SINGLE_FILE)
    (directory / SINGLE_FILE).unlink()
    parts = {"a.safetensors": {HEAD: held.pop(HEAD)}, "b.safetensors": held}
    for name, tensors in parts.items():
        save_file(tensors, directory / name, {"format": "pt"})
    weight_map = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("family", TIED)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "two files"])
def test_a_head_of_its_own_is_refused_and_the_advice_gives_transformers_model(
    one_rank: ParallelGroups, tmp_path: Path, family: str, sharded: bool
) -> None:
    vocabulary = write_model(tmp_path, family, TIED[family]).config.vocab_size
    embedding = load_file(tmp_path / SINGLE_FILE)[EMBEDDING]
    head = embedding + 0.3 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(2))
    rewritten(tmp_path, **{HEAD: head})
    if sharded:
        in_two_files(tmp_path)
    (line,) = weight_problems(read_model(tmp_path))
    assert f"tensor {HEAD} differs from {EMBEDDING} though tie_word_embeddings is true" in line
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(theirs.lm_head.weight, head)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert weight_problems(read_model(tmp_path)) == []
    policy, _ = loaded_policy(hf_run(tmp_path), vocabulary)
    batch = batch_of(vocabulary, (30, 3))
    off = packed_logits(policy, batch)[:, :vocabulary] - reference_logits(theirs, batch)
    assert off.abs().max() < 1e-4


OTHERS = {
    "the same": (lambda e: e, ""),
    "the same, as fp32": (lambda e: e.float(), ""),
    "one bit": (lambda e: torch.cat([e[:-1], -e[-1:]]), "differs from"),
    "not a number": (lambda e: e * torch.nan, "differs from"),
    "rounded": (lambda e: e.to(torch.float8_e4m3fn), "differs from"),
    "longer": (lambda e: torch.cat([e, e[:3]]), "differs from"),
    "shorter": (lambda e: e[:-1], "differs from"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_counts_as_the_embedding(tmp_path: Path, name: str) -> None:
    change, words = OTHERS[name]
    write_model(tmp_path, "qwen2", TIED["qwen2"], dtype="bfloat16")
    rewritten(tmp_path, **{HEAD: change(load_file(tmp_path / SINGLE_FILE)[EMBEDDING].clone())})
    problems = weight_problems(read_model(tmp_path))
    assert len(problems) == bool(words) and all(words in line for line in problems)


def test_a_model_without_one_of_the_two_is_refused(tmp_path: Path) -> None:
    """transformers ties the embedding to a head that is alone, and draws a head where an untied model has none."""
    for tied, lost in ((True, EMBEDDING), (False, HEAD)):
        write_model(tmp_path / str(tied), "qwen2", SMALL)
        config = json.loads((tmp_path / str(tied) / "config.json").read_text())
        (tmp_path / str(tied) / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        rewritten(tmp_path / str(tied), **{lost: None})
        (line,) = weight_problems(read_model(tmp_path / str(tied)))
        assert f"tensor {lost} is missing" in line
