"""Directories that Megatron-LM wrote: however it calls, cuts and stacks tensors, logits are those of the source."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint.hf.save import export_checkpoint, origin_of
from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.pickled import read
from megatron_rl.checkpoint.run_state import architecture_problems, continuation_problems, read_run_state
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.families import Stages
from megatron_rl.families.family import SMALL
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.megatron import common_writer
from tests.support.foreign import (
    MODEL_FILE,
    POINTER,
    Topology,
    args_of,
    numbered_experts,
    random_policy,
    stacked_experts,
    transformer_engine,
    write_dist,
    write_ranks,
)
from tests.support.hugging_face import batch_of, hf_run, loaded_policy, packed_logits, write_model
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

DENSE: dict[str, Any] = {}
TIED = {"untie_embeddings_and_output_weights": False, "num_layers": 4}
UNGATED = {"swiglu": False, "squared_relu": False, "add_bias_linear": True}
QWEN3 = {"add_qkv_bias": False, "qk_layernorm": True, "kv_channels": 12}
EXPERTS = {**QWEN3, "num_experts": 4, "moe_ffn_hidden_size": 24, "num_layers": 4, "num_query_groups": 4}

writes_args = pytest.mark.skipif(common_writer() is None, reason="megatron-core 0.19 writes no common.pt: no args")


def _logits(policy: PolicyModel) -> torch.Tensor:
    return packed_logits(policy, batch_of(VOCABULARY, (30, 3, 11)))[:, :VOCABULARY]


def _assert_loads(path: Path, source: PolicyModel, config: RLConfig, groups: Any) -> None:
    """The logits are equal to the bit: the same weights on the same single rank."""
    assert architecture_problems(config, find_checkpoint(path), VOCABULARY) == []
    policy = tiny_policy(config, seed=2)
    assert not torch.equal(_logits(policy), _logits(source))
    CheckpointManager(path / "run", 0, groups).start_from_weights(str(path), policy)
    assert torch.equal(_logits(policy), _logits(source))


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [DENSE, TIED, QWEN3, EXPERTS], ids=["qwen2", "tied", "qwen3", "experts"])
@pytest.mark.parametrize("layers", ["stacked", "non_homogeneous_layers", "singleton_local_shards"])
def test_torch_dist_loads_however_layers_are_named(
    one_rank, tmp_path: Path, shape: dict[str, Any], layers: str
) -> None:
    config = tiny_config(**shape)
    source, metadata = random_policy(config), {} if layers == "stacked" else {layers: True}
    write_dist(tmp_path, source, args_of(config), **metadata)
    _assert_loads(tmp_path, source, config, one_rank)


def test_experts_in_a_loop_store_the_same_names(one_rank, tmp_path: Path) -> None:
    """megatron-core's `SequentialMLP` writes, gate and up projection apart too; our grouped experts read."""
    loop = tiny_config(**EXPERTS, no_moe_grouped_gemm=True)
    source = random_policy(loop)
    write_dist(tmp_path, source, None, singleton_local_shards=True)
    described = (tmp_path / "iter_0000100" / ".metadata").read_bytes()
    assert b"experts.3.linear_fc1.weight_w" in described
    _assert_loads(tmp_path, source, tiny_config(**EXPERTS), one_rank)


@pytest.mark.parametrize("has_args", [True, False], ids=["args", "no args"])
@pytest.mark.parametrize(
    ("shape", "topology", "stages", "rename"),
    [
        (DENSE, Topology(), None, transformer_engine),
        (DENSE, Topology(2), None, lambda tensors: tensors),
        (UNGATED, Topology(2), None, transformer_engine),
        (TIED, Topology(2, 2), None, transformer_engine),
        (TIED, Topology(1, 2), Stages(2, first=1), transformer_engine),
        (TIED, Topology(1, 2), Stages(2, chunks=2), transformer_engine),
        (EXPERTS, Topology(2), None, numbered_experts),
        (EXPERTS, Topology(2, cut=1), None, numbered_experts),
        (EXPERTS, Topology(1, 1, 2), None, numbered_experts),
        (EXPERTS, Topology(2, 2, 2, 2), None, stacked_experts),
        (EXPERTS, Topology(2, 1, 4, 1), None, lambda tensors: tensors),
        (EXPERTS, Topology(4, 2, 2, 1), Stages(2, chunks=2), numbered_experts),
    ],
    ids=lambda value: str(value) if isinstance(value, Topology) else getattr(value, "__name__", None),
)  # fmt: skip
def test_files_of_ranks_load_however_they_are_cut(
    one_rank, tmp_path: Path, shape: dict[str, Any], topology: Topology, stages: Stages | None, rename: Any,
    has_args: bool,
) -> None:
    config = tiny_config(**shape)
    source = random_policy(config)
    args = args_of(config) if has_args else None
    write_ranks(tmp_path, source, args, topology, stages, rename, padded=VOCABULARY + 16)
    _assert_loads(tmp_path, source, config, one_rank)


@pytest.mark.parametrize("write", [write_dist, write_ranks])
def test_a_release_is_what_the_pointer_names(one_rank, tmp_path: Path, write: Any) -> None:
    config = tiny_config()
    source = random_policy(config)
    write(tmp_path, source, args_of(config)).rename(tmp_path / "release")
    (tmp_path / POINTER).write_text("release")
    write(tmp_path / "other", random_policy(config, 3), None, step=7).rename(tmp_path / "iter_0000007")
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "release") == tmp_path / "release"
    _assert_loads(tmp_path, source, config, one_rank)


def test_weights_alone_are_taken_and_a_line_says_so(one_rank, tmp_path: Path, caplog) -> None:
    config = tiny_config()
    directory = write_dist(tmp_path, random_policy(config), args_of(config))
    (line,) = continuation_problems(config, directory)
    assert "written by Megatron-LM" in line and "--pretrained-checkpoint" in line
    assert read_run_state(directory).origin is None
    with caplog.at_level("INFO"):
        CheckpointManager(tmp_path / "run", 0, one_rank).start_from_weights(str(tmp_path), tiny_policy(config))
    assert f"weights from {directory}, written by Megatron-LM, whose optimizer state is not taken" in caplog.messages


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_dist, write_ranks])
def test_without_args_names_and_shapes_decide(one_rank, tmp_path: Path, write: Any) -> None:
    config = tiny_config(**EXPERTS)
    directory = write(tmp_path, random_policy(config), None)
    for change, text in (
        ({"num_layers": 2}, "has decoder.layers.2.input_layernorm.weight and 29 more, which the model of this run"),
        ({"num_layers": 5}, "lacks decoder.layers.4.input_layernorm.weight and 14 more"),
        ({"moe_ffn_hidden_size": 32}, "linear_fc1.weight: it has [48, 32], the model wants [64, 32]"),
        ({"num_experts": 8}, "lacks decoder.layers.0.mlp.experts.local_experts.4.linear_fc1.weight and 31 more"),
    ):
        lines = architecture_problems(tiny_config(**EXPERTS | change), directory, VOCABULARY)
        assert len([line for line in lines if text in line]) == 1, lines
    (line,) = architecture_problems(config, directory, VOCABULARY + 1)
    assert f"has {VOCABULARY} rows in embedding.word_embeddings.weight, too few for a vocabulary of 33" in line
    with pytest.raises(CheckpointError, match=r"it has \[48, 32\], the model wants \[64, 32\]"):
        other = tiny_policy(tiny_config(**EXPERTS | {"moe_ffn_hidden_size": 32}))
        CheckpointManager(tmp_path / "run", 0, one_rank).start_from_weights(str(tmp_path), other)


@pytest.mark.parametrize(
    ("name", "value"),
    [("multi_latent_attention", True), ("window_size", (128, 0)), ("mtp_num_layers", 1)],
)  # fmt: skip
def test_a_model_that_is_not_built_is_named_by_its_flag(one_rank, tmp_path: Path, name: str, value: Any) -> None:
    config = tiny_config(**EXPERTS)
    directory = write_ranks(tmp_path, tiny_policy(config), args_of(config, **{name: value}))
    (line,) = architecture_problems(config, directory, VOCABULARY)
    assert f"was made with {name} {value!r}, which is not built here" in line


def test_tensors_of_an_unknown_architecture_are_named(one_rank, tmp_path: Path) -> None:
    config = tiny_config()

    def shared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"decoder.layers.0.mlp.shared_experts.linear_fc1.weight": torch.zeros(4, 32)}

    directory = write_ranks(tmp_path, tiny_policy(config), None, rename=shared)
    (line,) = architecture_problems(config, directory, VOCABULARY)
    assert "has decoder.layers.0.mlp.shared_experts.linear_fc1.weight, which the model of this run has not" in line
    assert "no flag builds that" in line
    legacy = write_ranks(tmp_path / "legacy", tiny_policy(config), None, rename=lambda _: {"language_model": {}})
    with pytest.raises(CheckpointError, match=r"no tensors in 'model'.*convert an older one with"):
        architecture_problems(config, legacy, VOCABULARY)


def test_quantised_weights_are_refused(one_rank, tmp_path: Path) -> None:
    config = tiny_config()

    def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.to(torch.int8) if n.endswith("linear_proj.weight") else t for n, t in tensors.items()}

    directory = write_ranks(tmp_path, tiny_policy(config), None, rename=quantised)
    (line,) = architecture_problems(config, directory, VOCABULARY)
    assert "stores decoder.layers.0.self_attention.linear_proj.weight and 1 more in another number format" in line


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"metadata.json": json.dumps({"sharded_backend": "zarr"})}, "'zarr'"),
        ({".metadata": ""}, "'fsdp_dtensor or torch_dcp'"),
    ],
)
@pytest.mark.parametrize("named", ["root", "itself"])
def test_another_format_is_named_and_not_called_damaged(
    tmp_path: Path, files: dict[str, str], kind: str, named: str
) -> None:
    directory = tmp_path / "iter_0000012"
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    (tmp_path / POINTER).write_text("12")
    with pytest.raises(CheckpointError, match=f"written by Megatron-LM in its format {kind}") as caught:
        find_checkpoint(tmp_path if named == "root" else directory)
    assert "damaged" not in str(caught.value)
    assert "\n" not in str(caught.value)


# -- what is damaged -------------------------------------------------------------------------------


def test_a_pointer_to_nowhere_is_one_line(one_rank, tmp_path: Path) -> None:
    directory = write_ranks(tmp_path, tiny_policy(), None)
    (tmp_path / POINTER).write_text("40")
    with pytest.raises(CheckpointError, match=r"names '40', there is iter_0000012; name one of them") as caught:
        find_checkpoint(tmp_path)
    assert "damaged" not in str(caught.value)
    assert find_checkpoint(directory) == directory
    (tmp_path / POINTER).unlink()
    with pytest.raises(CheckpointError, match=r"iteration\.txt' cannot be read.*name one of them, such as"):
        find_checkpoint(tmp_path)


def test_a_directory_of_hugging_face_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=f"Hugging Face's format; use --load-hf {tmp_path}"):
        find_checkpoint(tmp_path)


def test_missing_and_truncated_files_are_named(one_rank, tmp_path: Path) -> None:
    config = tiny_config()
    ranks, whole = write_ranks(tmp_path / "ranks", tiny_policy(config), None, Topology(2, 2)), tmp_path / "whole"
    file = ranks / "mp_rank_01_001" / MODEL_FILE
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng\.pt' cannot be read \(it is cut short"):
        architecture_problems(config, ranks, VOCABULARY)
    shutil.rmtree(file.parent)
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng\.pt' cannot be read \(there is no such"):
        architecture_problems(config, ranks, VOCABULARY)
    shutil.copytree(ranks / "mp_rank_00_001", file.parent)
    (ranks / "mp_rank_02_000").mkdir()
    with pytest.raises(CheckpointError, match="has mp_rank_02_000, of which its args do not tell"):
        architecture_problems(config, ranks, VOCABULARY)
    directory = write_dist(whole, tiny_policy(config), args_of(config))
    part = directory / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' is cut short: it has \d+ bytes of \d+"):
        find_checkpoint(whole)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp' is missing, \.metadata names it"):
        find_checkpoint(whole)
    (directory / ".metadata").write_bytes((directory / ".metadata").read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r"\.metadata' cannot be read"):
        find_checkpoint(whole)


class _Command:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_no_pickle_of_others_is_executed(one_rank, tmp_path: Path, file: str) -> None:
    config, proof = tiny_config(), tmp_path / "executed"
    directory = write_dist(tmp_path, tiny_policy(config), args_of(config))
    if file == ".metadata":
        (directory / file).write_bytes(pickle.dumps(_Command(proof)))
    else:
        torch.save({"args": _Command(proof)}, directory / file)
    reason = r"names posix\.mkdir, which is not allowed.*nothing of it was executed"
    refused = pytest.raises(CheckpointError, match=reason)
    with refused if file == ".metadata" else contextlib.nullcontext():  # of the other plain values are read alone
        assert architecture_problems(config, find_checkpoint(directory), VOCABULARY) == []
    assert not proof.exists()


@writes_args
def test_a_class_that_only_a_newer_megatron_has_is_passed_over(one_rank, tmp_path: Path, monkeypatch) -> None:
    config, newer = tiny_config(), ModuleType("megatron.core.newer")
    newer.Kind = Enum("Kind", "one two", module=newer.__name__)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, newer.__name__, newer)
        directory = write_dist(tmp_path, tiny_policy(config), args_of(config, kind=newer.Kind.two))
    assert architecture_problems(config, directory, VOCABULARY) == []
    assert type(read(directory / "common.pt")["args"].kind).__name__ == "Emptied"


# -- to Hugging Face -------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [pytest.param(write_dist, marks=writes_args), write_ranks])
def test_it_becomes_the_directory_that_its_tokenizer_names(one_rank, tmp_path: Path, write: Any) -> None:
    settings = {**SMALL, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    write_model(tmp_path / "model", "qwen3_moe", settings)
    config = hf_run(tmp_path / "model")
    policy, _ = loaded_policy(config, SMALL["vocab_size"])
    args = args_of(config, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "model"))
    write(tmp_path / "run", policy, args, **({"padded": 128} if write is write_ranks else {}))
    export_checkpoint(tmp_path / "run", origin_of(tmp_path / "run", "--hf-config"), tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    vars(args).update(tokenizer_model="gone/too/far")
    write(tmp_path / "other", policy, args)
    with pytest.raises(ConfigError, match="gone/too/far/config.json cannot be read.*as --hf-config DIR"):
        origin_of(tmp_path / "other", "--hf-config")
