"""Rotary positions of every family, plain and scaled, are those of transformers; what is not built is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.families import read_model
from megatron_rl.families.family import FAMILIES, SMALL
from megatron_rl.platform.groups import ParallelGroups

YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, explicit factor": {**YARN, "attention_factor": 0.9},
    "yarn, DeepSeek's": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 20.0},
    "yarn, one of two": {**YARN, "mscale": 0.5, "beta_slow": 2.0},
    "yarn, gpt-oss": {**YARN, "factor": 32.0, "truncate": False},
    "yarn, from the lengths": {**YARN, "factor": None},
}
SHAPE = {**SMALL, "head_dim": 16, "max_position_embeddings": 8192}


def _written(directory: Path, **changes: Any) -> Path:
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, **changes}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def _tables_agree(directory: Path, name: str, layer_type: str | None = None) -> None:
    # Not at the top: megatron must be imported after it has been prepared, transformers takes seconds.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megatron_rl.models.attention.rotation import rope_tables

    theirs = AutoConfig.from_pretrained(directory)
    of_layer = theirs.rope_parameters if layer_type is None else theirs.rope_parameters[layer_type]
    angles, factor = ROPE_INIT_FUNCTIONS[of_layer["rope_type"]](theirs, "cpu", layer_type=layer_type)
    angles = torch.arange(4096, dtype=torch.float32)[:, None] * angles
    table = rope_tables(read_model(directory).architecture, 4096, on_cpu=True)[name]
    half = angles.shape[1]
    assert (table.cos[:, :half] - angles.cos() * factor).abs().max() <= 1e-6
    assert (table.sin[:, half:] - angles.sin() * factor).abs().max() <= 1e-6
    assert torch.equal(table.sin[:, :half], -table.sin[:, half:])


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_are_those_of_transformers(one_rank: ParallelGroups, tmp_path, scaling) -> None:
    _tables_agree(_written(tmp_path, rope_parameters=scaling), "main")


@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
@pytest.mark.parametrize("name", FAMILIES.names())
def test_every_family_reads_them(one_rank: ParallelGroups, tmp_path, name: str, scaling) -> None:
    family = FAMILIES.get(name)
    example = {**family.examples[0], "max_position_embeddings": 8192}
    nested = "sliding_attention" in example.get("rope_parameters", {})
    rope = {**example["rope_parameters"], "full_attention": scaling} if nested else scaling
    values = {**example, "rope_parameters": rope, "model_type": name, "architectures": [family.class_name]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    _tables_agree(tmp_path, "main", "full_attention" if nested else None)


def test_the_older_spelling_is_the_same(tmp_path) -> None:
    old = {key: value for key, value in YARN.items() if key != "rope_theta"} | {"type": "yarn"}
    newer = read_model(_written(tmp_path, rope_parameters=YARN)).architecture
    assert read_model(_written(tmp_path, rope_theta=1000000.0, rope_scaling=old)).architecture == newer
    assert (newer.rope_type, newer.rotary_scaling_factor, newer.original_max_position_embeddings) == ("yarn", 4.0, 256)


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 'rope_parameters.rope_type "dynamic" is not built'),
        ({"rope_type": "longrope", "short_factor": [1.0]}, 'rope_type "longrope"'),
        ({"rope_type": "yarn"}, "lacks rope_parameters.factor"),
        ({"type": "su"}, 'rope_type "su"'),
        ({**YARN, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta 0.1 is not built"),
        ({**YARN, "factor": 0.5}, "factor must be a number of at least 1, got 0.5"),
        ({**YARN, "beta_fast": "32"}, "beta_fast must be a number above 0"),
        ({**YARN, "factor": 1.0, "attention_factor": 2.0}, "attention_factor 2.0 is not built"),
        ({**LLAMA3, "low_freq_factor": 2.0}, "low_freq_factor 2.0"),
        ({"rope_type": "default", "factor": 2.0}, "factor 2.0 is not built here: rotation of the type default"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, rope: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_model(_written(tmp_path, rope_parameters=rope))
    assert told in str(error.value)
