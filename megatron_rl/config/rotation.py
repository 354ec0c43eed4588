"""How rotary positions reach beyond the context that a model was first trained with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, flag
from megatron_rl.families.architecture import YARN

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


@dataclass(frozen=True, kw_only=True)
class RotationConfig:
    """RoPE scaling for long contexts; --load-hf sets it from config.json."""

    rotary_seq_len_interpolation_factor: float | None = flag(None, ge=1, le=10_000)
    """Divide positions by this factor before RoPE, e.g. 8. Sliding-window layers with --rotary-base-local are not
    scaled."""
    rope_type: Literal["rope", "yarn"] = flag("rope")
    """yarn: scale RoPE as YaRN does (arXiv:2309.00071), by the flags below. Sliding-window layers with
    --rotary-base-local are not scaled."""
    rotary_scaling_factor: float = flag(1.0, ge=1, le=10_000)
    """YaRN: context length relative to the original one, e.g. 4."""
    original_max_position_embeddings: int = flag(4096, ge=1, le=10**9)
    """YaRN: context length before scaling, e.g. 32768."""
    beta_fast: float = flag(32.0, gt=0, le=1e6)
    """YaRN: frequencies with more rotations than this in the original context are not scaled."""
    beta_slow: float = flag(1.0, gt=0, le=1e6)
    """YaRN: frequencies with fewer rotations than this are divided by the factor."""
    mscale: float = flag(1.0, ge=-1000, le=1000)
    """YaRN: multiply cos and sin by 1 + 0.1 x mscale x ln(factor)."""
    mscale_all_dim: float = flag(0.0, ge=0, le=1000)
    """YaRN: divide cos and sin by 1 + 0.1 x mscale-all-dim x ln(factor)."""
    correction_range_round_to_int: bool = flag(True, off="--no-correction-range-round-to-int")
    """Rounding of YaRN's bounds between scaled and unscaled frequencies to integers (truncate in config.json)."""


def rotation_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what YaRN lacks, and what it cannot be combined with."""
    rotation, model = config.rotation, config.model
    if rotation.rope_type != "yarn":
        for name in YARN:
            if getattr(rotation, name) != RotationConfig.__dataclass_fields__[name].default:
                yield name, "has no effect without --rope-type yarn; add it"
        return
    if rotation.beta_fast < rotation.beta_slow:
        yield "beta_fast", f"must be at least --beta-slow {rotation.beta_slow:g}"
    for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if config.value(name):
            yield name, "and --rope-type yarn are two ways to scale positions; keep one of them"
    if model.rotary_base == 1:
        yield "rotary_base", "with --rope-type yarn: it has one frequency alone; use 10000 or such"
