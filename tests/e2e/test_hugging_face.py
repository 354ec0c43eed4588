"""`--load-hf` as a user gives it: every wrong directory is one line, a right one starts a run that can go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.families.family import SMALL
from tests.support.checkpoints import weights
from tests.support.hugging_face import write_model
from tests.support.runs import run, run_many

SHAPE_FLAGS = (
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "group-query-attention", "num-query-groups",
    "swiglu", "disable-bias-linear", "add-qkv-bias", "untie-embeddings-and-output-weights", "tokenizer-model",
)  # fmt: skip
ENDS = "an answer ends with <|end|> (0), <|stop|> (16)"
LAYER = "model.layers.1.mlp.up_proj.weight"
CONFIG: dict[str, dict[str, Any]] = {
    "unknown": {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
    "reward model": {"architectures": ["Qwen2ForSequenceClassification"]},
    "window": {"use_sliding_window": True},
    "layer types": {"layer_types": ["full_attention", "sliding_attention"]},
    "dynamic": {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "quantised": {"quantization_config": {"quant_method": "fp8"}},
    "no width": {"hidden_size": None},
    "odd width": {"hidden_size": "32"},
    "vocabulary": {"vocab_size": 24},
    "narrower": {"intermediate_size": 32},
}
"""Changes to a right ``config.json``."""


@pytest.fixture(scope="module")
def model(workshop) -> Path:
    """A Qwen2 of the workshop's vocabulary with its tokenizer, in four files; <|stop|> ends an answer too."""
    directory = workshop.folder / "model"
    write_model(directory, "qwen2", {**SMALL, "vocab_size": 20}, max_shard_size="20KB")
    shutil.copytree(workshop.tokenizer, directory, dirs_exist_ok=True)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 16, "content": "<|stop|>"})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 16]}))
    return directory


@pytest.fixture(scope="module")
def changed(workshop, model) -> Callable[..., Path]:
    """A copy of the model with something done to it."""

    def change(name: str, edit: Callable[[Path], None]) -> Path:
        directory = workshop.folder / "changed" / name.replace(" ", "_")
        shutil.copytree(model, directory)
        edit(directory)
        return directory

    return change


def _with_config(values: dict[str, Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def _file_of(directory: Path, tensor: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][tensor]


def _without_tensor(directory: Path) -> None:
    path, index = _file_of(directory, LAYER), directory / "model.safetensors.index.json"
    tensors = load_file(path)
    del tensors[LAYER]
    save_file(tensors, path)
    content = json.loads(index.read_text())
    del content["weight_map"][LAYER]
    index.write_text(json.dumps(content))


def _with_another_tensor(directory: Path) -> None:
    path, index = _file_of(directory, LAYER), directory / "model.safetensors.index.json"
    save_file(load_file(path) | {"model.layers.1.self_attn.o_proj.bias": torch.zeros(32)}, path)
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.1.self_attn.o_proj.bias"] = path.name
    index.write_text(json.dumps(content))


def _only_pickled(directory: Path) -> None:
    for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
        path.unlink()
    (directory / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK")


def _truncated(directory: Path) -> None:
    path = _file_of(directory, LAYER)
    path.write_bytes(path.read_bytes()[:-100])


def _empty(directory: Path) -> None:
    _file_of(directory, LAYER).write_bytes(b"")


def _escaping(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {LAYER: "../model/config.json"}}))


@pytest.fixture(scope="module")
def cases(workshop, model, changed):
    """Name -> command and the parts its one line must have."""

    def starting(directory: Path, **changes: Any) -> list[str]:
        return workshop.rl("x", **dict.fromkeys(SHAPE_FLAGS), load_hf=directory, **changes)

    larger = json.loads((workshop.tokenizer / "tokenizer.json").read_text())
    larger["model"]["vocab"] |= {text: len(larger["model"]["vocab"]) + n for n, text in enumerate("uvwxyz")}
    damage = {
        "missing file": (lambda d: _file_of(d, LAYER).unlink(), [".safetensors is missing", "index.json names"]),
        "truncated": (_truncated, ["is not a whole safetensors file", "truncated", "fetch it again"]),
        "empty": (_empty, ["is not a whole safetensors file", "fetch it again"]),
        "missing tensor": (_without_tensor, [f"tensor {LAYER} is missing", "Qwen2ForCausalLM"]),
        "surplus tensor": (_with_another_tensor, ["model.layers.1.self_attn.o_proj.bias", "would be ignored"]),
        "pickle": (_only_pickled, ["only pytorch_model-00001", "can run code", "save_pretrained"]),
        "escaping": (_escaping, ["'../model/config.json'", "no safetensors file beside it"]),
        "bad json": (lambda d: (d / "config.json").write_text("{"), ["config.json is not JSON"]),
        "no config": (lambda d: (d / "config.json").unlink(), ["config.json cannot be read", "Hugging Face format"]),
        "tokenizer": (
            lambda d: (d / "tokenizer.json").write_text(json.dumps(larger)),
            ["vocab_size is 20", "model's own tokenizer"]),
    }  # fmt: skip
    facts = {
        "unknown": ["MambaForCausalLM is not known", "Qwen2ForCausalLM (Qwen2 and Qwen2.5)", "LlamaForCausalLM"],
        "reward model": ["Qwen2ForSequenceClassification is not known"],
        "window": ["use_sliding_window true is not built"],
        "layer types": ['layer_types "sliding_attention" is not built'],
        "dynamic": ['rope_scaling.rope_type "dynamic" is not built'],
        "quantised": ["quantization_config", '"fp8"', "is not built"],
        "no width": ["lacks hidden_size"],
        "odd width": ["hidden_size must be a whole number", "'32'"],
        "vocabulary": ["tensor model.embed_tokens.weight has shape 20 x 32", "means 24 x 32", "(and 1 more)"],
        "narrower": ["tensor model.layers.0.mlp.gate_proj.weight has shape 48 x 32", "means 32 x 32", "(and 5 more)"],
    }
    found = {name: (starting(changed(name, edit)), texts) for name, (edit, texts) in damage.items()}
    found |= {name: (starting(changed(name, _with_config(CONFIG[name]))), texts) for name, texts in facts.items()}
    return found | {
        "nowhere": (starting(workshop.folder / "nowhere"), ["nowhere/config.json cannot be read"]),
        "layers": (starting(model, num_layers=3), ["--num-layers 3 contradicts", "config.json", "--num-layers 2"]),
        "bias": (starting(model, no_add_qkv_bias=True), ["--no-add-qkv-bias contradicts", "means --add-qkv-bias"]),
        "longer": (starting(model, max_position_embeddings=4096), ["--max-position-embeddings 4096", "1024"]),
        "two starts": (
            starting(model, pretrained_checkpoint=workshop.folder / "nowhere"),
            ["--load-hf", "--pretrained-checkpoint", "keep one of them", f"takes --hf-config {model}"]),
        "two shapes": (starting(model, hf_config=workshop.folder), ["--hf-config", "both say what the model is"]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def checked(cases, workshop, model):
    """All of them checked in one process, and two right ones."""
    right = [
        workshop.rl("x", **dict.fromkeys(SHAPE_FLAGS), load_hf=model),
        workshop.rl("x", **dict.fromkeys(SHAPE_FLAGS), hf_config=model, num_layers=2, hidden_size=32, add_qkv_bias=True,
                    group_query_attention=True, max_position_embeddings=512, tokenizer_model=workshop.tokenizer),
    ]  # fmt: skip
    commands = [argv for argv, _ in cases.values()]
    first, second, *others = run_many([[*argv, "--check"] for argv in (*right, *commands)])
    return {"load": first, "shape only": second, **dict(zip(cases, others, strict=True))}


def test_each_problem_is_one_line_with_its_facts(cases, checked) -> None:
    for name, (_, fragments) in cases.items():
        lines = checked[name].check(2).output.strip().splitlines()
        assert len(lines) == (3 if name == "two starts" else 2), f"{name}: {lines}"  # one of the two is absent too
        assert [text for text in fragments if text not in lines[1]] == [], f"{name}: {lines}"


def test_a_right_directory_replaces_the_flags_and_flags_may_agree(checked) -> None:
    for name in ("load", "shape only"):
        assert "configuration is valid" in checked[name].check(0).output


def test_a_run_starts_from_it_and_resumes_from_its_own(workshop, model) -> None:
    """The second start must not fall back to the directory's weights."""
    flags = dict.fromkeys(SHAPE_FLAGS) | {"load_hf": model, "save_interval": 1, "resume": True}
    first = run(workshop.supervised("hf", **flags, train_iters=3, exit_interval=1)).check()
    assert "MiB read by this rank" in first.output
    assert ENDS in first.output
    checkpoints = workshop.run_dir("hf") / "checkpoints"
    run(workshop.supervised("hf", **flags, train_iters=3)).check()
    bare = workshop.folder / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("generation_config.json", "*.safetensors*"))
    from_it = {"load_hf": None, "hf_config": bare, "pretrained_checkpoint": checkpoints}
    commands = [workshop.supervised("whole", **flags, train_iters=3)]
    commands.append(workshop.supervised("from_it", **flags | from_it, train_iters=1))
    _, later = (outcome.check() for outcome in run_many(commands))
    assert ENDS in later.output, "the checkpoint has not brought its end tokens"
    other = workshop.run_dir("whole") / "checkpoints"
    resumed, whole = weights(checkpoints / "step_0000003"), weights(other / "step_0000003")
    assert resumed.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []
    after_one = weights(other / "step_0000001")
    assert any(not torch.equal(after_one[name], whole[name]) for name in whole)
