"""Multi-head latent attention (MLA): keys and values are expanded from a latent vector that all heads share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.flags import Finding, divisors, flag, flags_of, without_effect

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_PLAIN = {
    "window_size": None, "softmax_type": "vanilla", "qk_layernorm": False, "add_qkv_bias": False,
    "add_bias_linear": False, "rotary_percent": 1.0, "transformer_impl": "local", "lora_rank": None,
    "sandwich_norm": False, "post_norm": False, "scale_embedding": False,
    "apply_layernorm_1p": False,
}  # fmt: skip
"""Settings with the one value that is built with latent attention."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (DeepSeek-V3, Moonlight, Kimi-K2); --load-hf sets it from config.json."""

    multi_latent_attention: bool = flag(False)
    """Use multi-head latent attention, with the sizes below."""
    q_lora_rank: int | None = flag(None, ge=1, le=1_000_000)
    """Width of the latent that queries are expanded from, e.g. 1536. Default: queries have no latent."""
    kv_lora_rank: int | None = flag(None, ge=1, le=1_000_000)
    """Width of the latent that keys and values are expanded from, e.g. 512."""
    qk_head_dim: int | None = flag(None, ge=1, le=65_536)
    """Width of the part of a query or key head that is not rotated, e.g. 128."""
    qk_pos_emb_head_dim: int | None = flag(None, ge=2, le=65_536)
    """Width of the part that RoPE rotates, in neighbouring pairs, e.g. 64. All key heads share it."""
    v_head_dim: int | None = flag(None, ge=1, le=65_536)
    """Width of a value head, e.g. 128."""
    rl_mla_absorb: bool = flag(True, off="--no-rl-mla-absorb")
    """Absorbed attention in rollouts, with a KV cache of latents. Without it the cache holds all heads and takes many
    times the memory."""

    @property
    def is_complete(self) -> bool:
        """The sizes are known, where there is latent attention."""
        return not self.multi_latent_attention or None not in (getattr(self, name) for name in _SIZES)


def latent_size_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report sizes that latent attention needs, and that fit neither each other nor the tensor-parallel size."""
    latent, model, parts = config.latent, config.model, config.parallel.tensor_model_parallel_size
    if not latent.multi_latent_attention:
        names = [each.name for each in flags_of(LatentConfig) if each.name != "multi_latent_attention"]
        yield from without_effect(config, names, "--multi-latent-attention")
        return
    missing = [name for name in _SIZES if getattr(latent, name) is None]
    for name in missing:
        yield name, "is missing: --multi-latent-attention has no default sizes"
    if missing:
        return
    whole = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    if latent.qk_pos_emb_head_dim % 2:
        yield "qk_pos_emb_head_dim", "is rotated in pairs; use an even number"
    if model.kv_channels != whole:
        yield "kv_channels", f"with --multi-latent-attention is the width of a whole query head; use {whole}"
    if model.num_query_groups != model.num_attention_heads:
        yield "num_query_groups", (
            f"with --multi-latent-attention: heads share a latent, not keys; use {model.num_attention_heads}"
        )
    widths = {"q_lora_rank": latent.q_lora_rank, "kv_lora_rank": latent.kv_lora_rank + latent.qk_pos_emb_head_dim}
    for name, width in widths.items():
        if width is not None and width % parts:
            yield name, (
                f": ranks share the {width} rows of its projection, which tensor-parallel size {parts} does not "
                f"divide; use --tensor-model-parallel-size {divisors(width)}"
            )


def latent_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what latent attention is not built with."""
    if not config.latent.multi_latent_attention:
        return
    for name, value in _PLAIN.items():
        if config.value(name) != value:
            wanted = "leave it out" if value in (None, False) else f"use {value}"
            yield name, f"is not built with --multi-latent-attention; {wanted}"
    if config.kv_cache_is_rounded:
        yield "rl_kv_cache_dtype", "is not built with --multi-latent-attention; use auto"
