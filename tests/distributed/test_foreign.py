"""Checkpoints with one file a rank: Megatron-LM's, read in another parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checkpoint.tensors import weights_fingerprint
from tests.support.foreign import Topology, numbered_experts, random_policy, transformer_engine, write_dist, write_ranks
from tests.support.ranks import run_ranks
from tests.support.tiny import VOCABULARY, tiny_config

TIED = {"untie_embeddings_and_output_weights": False, "num_layers": 4}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "num_layers": 4, "add_qkv_bias": False}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "tensor": (2, TIED, TENSOR),
    "stages": (2, TIED, {"pipeline_model_parallel_size": 2}),
    "virtual stages": (2, TIED, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "experts": (2, EXPERTS, {"expert_model_parallel_size": 2}),
    "cut experts": (2, EXPERTS, TENSOR),
    "whole experts": (2, EXPERTS, TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_reads_what_any_other_wrote(one_rank: Any, tmp_path: Path, monkeypatch: Any, layout: str) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    ranks, shape, parallel = LAYOUTS[layout]
    source = random_policy(tiny_config(**shape))
    rename = numbered_experts if "num_experts" in shape else transformer_engine
    splits = [Topology(), Topology(2), Topology(1, 2), *([Topology(2, 1, 4, 1)] if "num_experts" in shape else [])]
    directories = [
        write_ranks(tmp_path / str(split), source, None, split, rename=rename, padded=VOCABULARY + 8)
        for split in splits
    ]
    directories.append(write_dist(tmp_path / "dist", source, None))
    given = {"parallel": parallel, "shape": shape, "directories": [str(directory) for directory in directories]}
    wanted = weights_fingerprint(source, one_rank)
    for fingerprints in run_ranks("tests.distributed.name_programs:loaded", ranks, **given):
        assert fingerprints == [wanted] * len(directories)
