"""Rotary position settings of ``config.json`` as flags.

transformers 5 writes ``rope_parameters``; older files have ``rope_theta`` and ``rope_scaling``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.families.hf_config import HfConfig

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Megatron's --use-rope-scaling: those of Llama 3.1 to 3.3."""
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", *LLAMA3),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
"""Rotation type -> its settings, beside the base. Other types (dynamic, longrope, su) are refused."""
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Read elsewhere, or only relevant for images (mrope)."""


def read_rotation(config: HfConfig, base: float = 10000.0) -> dict[str, Any]:
    """Return the settings of a model with one rotation for all layers; ``base``: the family's default.

    Given both ``rope_parameters`` and ``rope_scaling``, transformers reads only the latter, so they must agree.
    """
    keys = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)] or ["rope_scaling"]
    first, *others = [_one_rotation(config, config.within(key), base) for key in keys]
    if others not in ([], [first]):
        config.refuse("rope_scaling", config.get("rope_scaling"), "rope_parameters says otherwise; keep one of them")
    return first


def _one_rotation(config: HfConfig, rope: HfConfig, base: float) -> dict[str, Any]:
    for name in rope.names:
        if isinstance(rope.get(name), Mapping):
            rope.refuse(name, rope.get(name), "every layer has the same positions")
    return {"rotary_base": rope.base("rope_theta", config.base("rope_theta", base)), **scaling_of(config, rope)}


def rotations_by_kind(config: HfConfig, base: float, local_base: float) -> dict[str, Any]:
    """Return the settings of models with another rotation in window layers; the bases are defaults.

    transformers 5 writes ``rope_parameters`` per kind of layer; in older files ``rope_theta`` and ``rope_scaling`` are
    of layers without a window.
    """
    by_kind = config.within("rope_parameters")
    whole, local = by_kind.within("full_attention"), by_kind.within("sliding_attention")
    local.expect("rope_type", "default", why="positions in windows are not scaled")
    if whole.get("rope_type") and config.get("rope_scaling"):
        config.refuse("rope_scaling", config.get("rope_scaling"), "rope_parameters says how; keep one of them")
    return {
        "rotary_base": whole.base("rope_theta", config.base("rope_theta", base)),
        "rotary_base_local": local.base("rope_theta", local_base),
        **scaling_of(config, whole if whole.get("rope_type") else config.within("rope_scaling")),
    }


def scaling_of(config: HfConfig, rope: HfConfig) -> dict[str, Any]:
    """Return the settings of the frequency scaling in ``rope``, a mapping of ``config``; refuses unsupported ones."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KEYS:
        rope.refuse("rope_type", kind, f"positions are unscaled, or scaled by {', '.join(list(_KEYS)[1:])}")
        return {}
    for name in rope.names:
        if name not in (*_COMMON, *_KEYS[kind]) and not isinstance(rope.get(name), Mapping):
            rope.refuse(name, rope.get(name), f"rotation of the type {kind} does not read it")
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": rope.factor("factor")}
    if kind == "llama3":
        for name, built in LLAMA3.items():
            if rope.get(name) != built:
                rope.refuse(name, rope.get(name), f"Megatron's scaling has {built} built in")
        return {"use_rope_scaling": True, "rope_scaling_factor": rope.factor("factor")}
    return _yarn(config, rope) if kind == "yarn" else {}


def _yarn(config: HfConfig, rope: HfConfig) -> dict[str, Any]:
    """Interpret like transformers' ``_compute_yarn_parameters``."""
    positions = config.whole("max_position_embeddings")
    key = "original_max_position_embeddings"
    original = config.whole(key, rope.whole(key, positions))
    factor = rope.factor("factor", positions / original if original < positions else None)
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        key: original,
        "beta_fast": rope.number("beta_fast") if rope.get("beta_fast") else 32.0,
        "beta_slow": rope.number("beta_slow") if rope.get("beta_slow") else 1.0,
        "correction_range_round_to_int": rope.switch("truncate", True),
        **_amplitude(rope, factor),
    }


def _amplitude(rope: HfConfig, factor: float) -> dict[str, float]:
    """Return Megatron's factors of cos and sin: (1 + 0.1 mscale ln factor) / (1 + 0.1 mscale_all_dim ln factor)."""
    factor_given, mscale, of_all = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor_given is not None:
        amplitude = rope.number("attention_factor")
        if factor <= 1 and amplitude != 1:
            rope.refuse("attention_factor", factor_given, "with a factor of 1 it is 1")
            return {}
        return {"mscale": (amplitude - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0, "mscale_all_dim": 0.0}
    if mscale and of_all:
        return {"mscale": rope.number("mscale"), "mscale_all_dim": rope.number("mscale_all_dim")}
    return {"mscale": 1.0, "mscale_all_dim": 0.0}
