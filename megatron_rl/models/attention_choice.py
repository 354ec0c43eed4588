"""The attention backends of a model: chosen by flags and device, and tried out before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron_rl.attention import Attention, choose, facts_of
from megatron_rl.attention.backend import Numbers
from megatron_rl.attention.kv_numbers import FP8
from megatron_rl.attention.proof import fault_of_cache, fault_of_packed
from megatron_rl.config import RLConfig
from megatron_rl.families import ModelLayout
from megatron_rl.parallel.collectives import any_rank
from megatron_rl.platform import Platform

_PLAIN = ("sdpa", "paged")
"""torch's own: what the others are compared with."""
_ELSEWHERE = "failed on another rank"


def parameter_dtype(config: RLConfig) -> torch.dtype:
    """bf16 with `--bf16`, otherwise fp32."""
    return torch.bfloat16 if config.precision.bf16 else torch.float32


def kv_cache_dtype(config: RLConfig) -> torch.dtype:
    """`--rl-kv-cache-dtype`; ``auto`` is the model's."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}[config.kv_cache_dtype]


def attention_of(
    config: RLConfig, platform: Platform, faults: Mapping[str, str] = MappingProxyType({})
) -> Attention:
    """`--attention-backend`, for this model on this device; ``faults`` are of backends that were tried.

    Raises:
        ConfigError: see `megatron_rl.attention.choose`.
    """
    return choose(config.kernels.attention_backend, facts_of(platform.device), _numbers(config), faults)


def proven_attention(config: RLConfig, platform: Platform, layout: ModelLayout) -> Attention:
    """`attention_of`, tried out in the shapes of ``layout``; what fails on one rank is used on none. Collective.

    Raises:
        ConfigError: the backend that the user asked for fails.
    """
    faults: dict[str, str] = {}
    while True:
        chosen = attention_of(config, platform, faults)
        found = _faults(chosen, config, platform, layout)
        if all(fault is None for fault in found.values()):
            return chosen
        faults |= {name: fault for name, fault in found.items() if fault is not None}


def _faults(chosen: Attention, config: RLConfig, platform: Platform, layout: ModelLayout) -> dict[str, str | None]:
    """By backend; None where a kernel passed on all ranks. Nothing is tried, or exchanged, for torch's own."""
    heads = config.model.num_attention_heads // layout.tensor_size
    shape = heads, layout.layers[0].cache.heads, platform.device
    found: dict[str, str | None] = {}
    if chosen.packed_name not in _PLAIN:
        found[chosen.packed_name] = fault_of_packed(chosen.packed, _numbers(config), *shape)
    if chosen.cache_name not in _PLAIN:
        fault = fault_of_cache(chosen.cache, _numbers(config), *shape)
        found[chosen.cache_name] = found.get(chosen.cache_name) or fault
    for name, fault in found.items():
        if dist.is_initialized() and any_rank(fault is not None):
            found[name] = fault or _ELSEWHERE
    return found


def _numbers(config: RLConfig) -> Numbers:
    return Numbers(parameter_dtype(config), kv_cache_dtype(config), config.model.kv_channels)
