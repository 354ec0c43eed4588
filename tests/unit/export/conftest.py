"""Tiny Hugging Face checkpoints, written by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 320, "tie_word_embeddings": False,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}


def write_model(directory: Path, family: str = "qwen3", shard_size: str = "50GB") -> Path:
    """A random bf16 model of the family in ``directory``, with the files of a tokenizer beside it."""
    torch.manual_seed(0)
    extra = _MOE if family.endswith("moe") else {}
    config = transformers.AutoConfig.for_model(family, **_SIZES, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():  # rows of different sizes: a scale in the wrong place must show
            if parameter.dim() == 2:
                parameter.mul_(torch.logspace(-1, 1, len(parameter))[torch.randperm(len(parameter))][:, None])
    model.save_pretrained(directory, max_shard_size=shard_size)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "merges.txt").write_text("a b\n")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> Path:
    """A directory of one safetensors file with these tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    return directory


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's tiny model, written once; not to be changed."""
    written: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in written:
            written[family] = write_model(tmp_path_factory.mktemp("models") / family, family)
        return written[family]

    return get
