"""Layers made of different blocks: what is not built is refused by name, sums are over the layers that a stage has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.families import Architecture, ExpertShare, LayerCache, LayerKind, ModelLayout, Stages
from megatron_rl.families.blocks import BLOCKS, blocks_of
from megatron_rl.families.weights import decoder_weights
from tests.support.tiny import VOCABULARY, tiny_config

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "qk_layernorm": True, "add_qkv_bias": False, "num_layers": 4}


def of_kinds(monkeypatch: pytest.MonkeyPatch, *changes: dict[str, str]) -> Architecture:
    """A model with experts, whose layers differ by ``changes`` from each other."""
    model = tiny_config(**EXPERTS).architecture(VOCABULARY)
    kinds = tuple(replace(kind, **changed) for kind, changed in zip(model.kinds, changes, strict=True))
    monkeypatch.setattr(Architecture, "kinds", kinds)
    return model


@pytest.mark.parametrize(("part", "name"), [("mixer", "states"), ("mlp", "shared")])
def test_a_block_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, part: str, name: str) -> None:
    model = of_kinds(monkeypatch, {}, {part: name}, {}, {})
    there = "heads, latent, gated, delta, dense, experts"
    with pytest.raises(ConfigError, match=f"a layer with '{name}' is not built; there are {there}"):
        ModelLayout.of(model)


def test_what_neither_block_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "states", replace(BLOCKS["heads"], computes=frozenset()))
    assert blocks_of(LayerKind(mixer="states", post_norms=True))
    with pytest.raises(ConfigError, match="a layer with window 6 is not built of states and dense"):
        blocks_of(LayerKind(mixer="states", window=6))


def test_a_dense_layer_before_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_kinds(monkeypatch, {"mlp": "dense"}, {}, {}, {})
    names = {parameter.name for parameter in ModelLayout.of(model, experts=ExpertShare(2, 1)).parameters}
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight" in names
    assert not any(name.startswith(("decoder.layers.0.mlp.experts", "decoder.layers.1.mlp.linear")) for name in names)
    tensors = decoder_weights(model).tensors
    assert tensors["model.layers.0.mlp.gate_proj.weight"] == (64, 32)
    assert tensors["model.layers.1.mlp.experts.3.up_proj.weight"] == (24, 32)
    assert tensors["model.layers.3.self_attn.k_norm.weight"] == (8,)


def test_room_for_a_sequence_is_that_of_the_stage_which_keeps_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 1, 1 and 5 numbers a token: stages of two layers keep 2 and 6, and of three and one 3 and 5."""
    monkeypatch.setitem(BLOCKS, "small", replace(BLOCKS["heads"], cache=lambda model, ranks: LayerCache(1, 1, 0)))
    monkeypatch.setitem(BLOCKS, "large", replace(BLOCKS["heads"], cache=lambda model, ranks: LayerCache(1, 3, 2)))
    model = of_kinds(monkeypatch, *[{"mixer": "small"}] * 3, {"mixer": "large"})
    for first, own, most in ((2, (2, 6), 6), (3, (3, 5), 5)):
        layouts = [ModelLayout.of(model, stage=stage, stages=Stages(2, first)) for stage in (0, 1)]
        assert tuple(layout.cache_numbers(10) for layout in layouts) == tuple(10 * numbers for numbers in own)
        assert [layout.slot_numbers(10) for layout in layouts] == [10 * most] * 2
        assert [layout.most_layers for layout in layouts] == [first] * 2
