"""`ModelLayout`, arithmetic alone, is what `GPTModel` becomes: every parameter, linear and cache."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import ModelLayout
from megatron_rl.families.architecture import padded_vocabulary
from megatron_rl.families.family import FAMILIES
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.models.blocks.delta import DeltaMixer
from megatron_rl.models.blocks.latent import LatentAttention
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.copies import StackedLinear
from megatron_rl.quantization.linears import parallel_linears
from tests.support.hugging_face import EXAMPLES, hf_run
from tests.support.ranks import run_ranks
from tests.support.tiny import SHAPES, VOCABULARY, tiny_config, tiny_policy


def told(layout: ModelLayout) -> dict[str, Any]:
    """What the layout says of a rank; lists, as JSON brings them back."""
    return {
        "parameters": [[parameter.name, list(parameter.local_shape)] for parameter in layout.parameters],
        "linears": [[one.name, one.kind, one.rows, one.columns, one.outputs, one.inputs] for one in layout.linears],
        "caches": [list(dataclasses.astuple(layer.cache))[: 5 if layer in layout.state_layers else 3]
                   for layer in layout.layers],
    }


def built(policy: PolicyModel) -> dict[str, Any]:
    """The same of the model."""
    attentions = [layer.self_attention for layer in policy.gpt.decoder.layers]
    return {
        "parameters": [[name, list(parameter.shape)] for name, parameter in policy.named_parameters()],
        "linears": [[name, *sizes_of(module)] for name, module in parallel_linears(policy.gpt).items()],
        "caches": [cache_of(one) for one in attentions],
    }


def cache_of(attention: torch.nn.Module) -> list[int]:
    """Heads, and the widths of keys and values; of a state also channels and taps."""
    if isinstance(attention, DeltaMixer):
        channels, _, kernel = attention.short_conv.weight.shape
        return [len(attention.A_log), *attention.widths, channels, kernel - 1]
    if isinstance(attention, LatentAttention):
        latent = attention.kv_layernorm.weight.numel()
        return [1, attention.linear_kv_down_proj.output_size, latent]
    return [attention.num_query_groups_per_partition, *[attention.hidden_size_per_attention_head] * 2]


def sizes_of(module: torch.nn.Module) -> tuple[str | int, ...]:
    """Kind, rows and columns here, and of all ranks."""
    if not isinstance(module, StackedLinear):
        kind = "column" if isinstance(module, ColumnParallelLinear) else "row"
        return kind, *module.weight.shape, module.output_size, module.input_size
    _, rows, columns = module.weight.shape
    ranks, cuts_rows = module.tensor_group.size(), module.split == "columns"
    whole = rows * (ranks if cuts_rows else 1), columns * (1 if cuts_rows else ranks)
    return "column" if cuts_rows else "row", rows, columns, *whole


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_of_flags(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    assert told(config.layout(VOCABULARY)) == built(tiny_policy(config))


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{name}-{index}" for name, index in EXAMPLES])
def test_of_every_family(one_rank: ParallelGroups, tmp_path: Path, example: tuple[str, int]) -> None:
    name, index = example
    family = FAMILIES.get(name)
    values = {"architectures": [family.class_name], **family.examples[index]}
    layout = ModelLayout.of(family.read(HfConfig(tmp_path, values)))
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = hf_run(tmp_path, hf_config=str(tmp_path), load_hf=False, make_vocab_size_divisible_by=1)
    assert told(layout) == built(tiny_policy(config))


def on_two_ranks(name: str, parallel: dict[str, int]) -> RLConfig:
    config = tiny_config(2, **SHAPES[name])
    return replace(config, parallel=replace(config.parallel, expert_tensor_parallel_size=None, **parallel))


def one_of_two_ranks(parallel: dict[str, int], shapes: list[str]) -> list[dict[str, Any]]:
    """Runs on each rank: what the models of ``shapes`` are there."""
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.groups import initialize

    configs = [on_two_ranks(name, parallel) for name in shapes]
    initialize(configs[0].parallel, current_platform())
    return [built(tiny_policy(config)) for config in configs]


def test_of_two_tensor_parallel_ranks() -> None:
    """With fewer groups than ranks each rank stores half a group, and caches all of it."""
    parallel = {"tensor_model_parallel_size": 2}
    shapes = ["one group", "all biases", "experts", "mixed", "latent", "odd widths"]
    ranks = run_ranks("tests.unit.families.test_layout:one_of_two_ranks", 2, parallel=parallel, shapes=shapes)
    expected = [told(on_two_ranks(name, parallel).layout(VOCABULARY)) for name in shapes]
    assert ranks == [expected, expected]


def test_of_two_pipeline_stages() -> None:
    shapes, parallel = ["grouped, gated, untied", "tied"], {"pipeline_model_parallel_size": 2}
    ranks = run_ranks("tests.unit.families.test_layout:one_of_two_ranks", 2, parallel=parallel, shapes=shapes)
    for stage, models in enumerate(ranks):
        for name, model in zip(shapes, models, strict=True):
            layout = on_two_ranks(name, parallel).layout(VOCABULARY, stage)
            assert (layout.is_first, layout.is_last) == (stage == 0, stage == 1)
            assert [layer.index for layer in layout.layers] == [stage]
            assert told(layout) == model


@pytest.mark.parametrize(
    ("vocabulary", "divisible_by", "ranks", "expected"),
    [(32, 8, 1, 32), (33, 8, 1, 40), (33, 8, 2, 48), (16, 16, 2, 32), (50257, 128, 8, 51200), (1, 1, 1, 1)],
)
def test_padding_of_the_vocabulary(vocabulary: int, divisible_by: int, ranks: int, expected: int) -> None:
    assert padded_vocabulary(vocabulary, divisible_by, ranks) == expected


def test_one_layer_on_two_ranks_by_hand() -> None:
    """Hidden 32, 4 heads and 2 groups of width 8, MLP 64 and gated."""
    layout = tiny_config(2, num_layers=1, tensor_model_parallel_size=2).layout(VOCABULARY)
    assert {linear.name: (linear.kind, linear.rows, linear.columns) for linear in layout.linears} == {
        "layers.0.self_attention.linear_qkv": ("column", (4 + 2 + 2) * 8 // 2, 32),
        "layers.0.self_attention.linear_proj": ("row", 32, 4 * 8 // 2),
        "layers.0.mlp.linear_fc1": ("column", 2 * 64 // 2, 32),
        "layers.0.mlp.linear_fc2": ("row", 32, 64 // 2),
    }
    assert layout.cache_numbers(3) == 3 * (8 + 8)
