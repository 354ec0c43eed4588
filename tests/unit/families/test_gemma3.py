"""Gemma 3's `config.json`: kinds of its layers, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.errors import ConfigError
from megatron_rl.families import LayerKind, read_model
from megatron_rl.families.family import FAMILIES

EXAMPLE = {"architectures": ["Gemma3ForCausalLM"], **FAMILIES.get("gemma3_text").examples[0]}
LOCAL, WHOLE = "sliding_attention", "full_attention"


def _read(folder: Path, **changes: Any):
    (folder / "config.json").write_text(json.dumps(EXAMPLE | changes))
    return read_model(folder).architecture


def test_each_layer_has_its_kind(tmp_path: Path) -> None:
    scale = 24**-0.5
    whole = LayerKind(scale=scale, post_norms=True)
    window = replace(whole, rotation="local", window=8)
    assert _read(tmp_path).kinds == (window, whole, window, whole)
    assert _read(tmp_path, layer_types=[LOCAL, LOCAL, WHOLE, LOCAL]).kinds == (window, window, whole, window)
    assert _read(tmp_path, layer_types=None, sliding_window_pattern=4).kinds == (window,) * 3 + (whole,)
    every = _read(tmp_path, layer_types=[WHOLE] * 4)
    assert every.kinds == (whole,) * 4 and every.window_size is None


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"layer_types": [LOCAL, WHOLE, WHOLE, LOCAL]}, ["layer_types", "one layer in every few attends"]),
        ({"layer_types": [WHOLE, LOCAL, LOCAL, LOCAL]}, ["layer_types", "one layer in every few attends"]),
        ({"layer_types": [LOCAL, WHOLE, LOCAL, "chunked"]}, ['layer_types "chunked" is not built']),
        ({"layer_types": [LOCAL] * 3}, ["layer_types names 3 layers"]),
        ({"num_hidden_layers": 10**9, "layer_types": None}, ["at most 1000 layers"]),
        ({"sliding_window": None}, ["lacks sliding_window"]),
        ({"sliding_window": 0}, ["sliding_window must be a whole number above 0"]),
        ({"layer_types": None, "sliding_window_pattern": "six"}, ["sliding_window_pattern must be a whole number"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention true"]),
        ({"hidden_activation": "silu"}, ['hidden_activation "silu"', "gelu_pytorch_tanh"]),
        ({"rope_parameters": {WHOLE: {"rope_type": "dynamic"}}}, ['full_attention.rope_type "dynamic" is not built']),
        ({"rope_parameters": {WHOLE: {"rope_type": "linear"}}}, ["lacks rope_parameters.full_attention.factor"]),
        ({"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2}}}, ["sliding_attention.rope_type"]),
        ({"rope_parameters": {WHOLE: 3}}, ["rope_parameters.full_attention must be a mapping"]),
        ({"rope_parameters": None, "rope_theta": 10.5}, ["rope_theta must be a whole number"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar must be a number above 0"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["Gemma3ForConditionalGeneration is not known"]),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, **changes)
    assert all(fragment in str(refused.value) for fragment in fragments), refused.value


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--transformer-impl", "transformer_engine"], "its fused layers compute Llama's"),
        (["--swiglu"], "--swiglu contradicts"),
        (["--window-size", "4"], "--window-size 4 contradicts"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path: Path, flags: list[str], fragment: str) -> None:
    _read(tmp_path)
    _, problems = read_config([*flags, "--hf-config", str(tmp_path)], 1)
    assert any(fragment in str(problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        ("--geglu --swiglu", "two activations"),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2 has no layers to tell apart"),
        ("--rotary-base-local 10", "without --window-size; add it"),
        ("--apply-layernorm-1p --normalization LayerNorm", "cannot be combined with --apply-layernorm-1p"),
        ("--sandwich-norm --num-experts 4", "not built for experts"),
        ("--window-size 0", "must be at least 1"),
    ],
)
def test_flags_that_need_each_other(flags: str, fragment: str) -> None:
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
    _, problems = read_config([*shape.split(), *flags.split()], 1)
    assert any(fragment in str(problem) for problem in problems), problems
