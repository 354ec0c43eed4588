"""Chooses among the attention backends, by flags and device, and tries them out before they are used."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.families import ModelLayout
from megatron_rl.models.attention.backend import Backend, CacheKernel, DeviceFacts, Numbers, PackedKernel
from megatron_rl.models.attention.kv_numbers import FP8
from megatron_rl.models.attention.self_check import fault_of_cache, fault_of_packed
from megatron_rl.platform import Platform
from megatron_rl.platform.collectives import any_rank
from megatron_rl.registry import BACKENDS

AUTO = "auto"
_PLAIN = ("sdpa", "paged")
"""torch's own: what the others are compared with."""
_CACHE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}


def facts_of(device: torch.device) -> DeviceFacts:
    """What backends ask about a device."""
    is_cuda = device.type == "cuda"
    return DeviceFacts(device.type, torch.cuda.get_device_capability(device) if is_cuda else None)


@dataclass(frozen=True)
class Attention:
    """The backends of a run: one for packed batches, one for the KV cache."""

    packed_name: str
    packed: PackedKernel
    cache_name: str
    cache: CacheKernel
    reason: str
    """One line for the log: what was chosen and why not something else."""

    def block_problems(self, block_size: int | None, overcommit: float) -> list[Problem]:
        """What the KV cache does not take: pages of that many tokens, or promising them more than once."""
        multiple = self.cache.block_multiple
        if self.cache.layout == "rows":
            text = (
                f"--rl-kv-overcommit {overcommit:g} needs a KV cache of pages, and the attention backend "
                f"{self.cache_name} keeps one of slots; leave it out, or use --attention-backend paged"
            )
            return [Problem("--rl-kv-overcommit", text)] if overcommit > 1 else []
        flag = "--inference-dynamic-batching-block-size"
        text = (
            f"{flag} {block_size} is not a multiple of {multiple}, as the pages of {self.cache_name} must be; use "
            f"{-(-(block_size or 0) // multiple) * multiple}"
        )
        return [Problem(flag, text)] if (block_size or 0) % multiple else []


def numbers_of(config: RLConfig) -> Numbers:
    """bf16 with `--bf16`, otherwise fp32; in the cache `--rl-kv-cache-dtype`, of which ``auto`` is the model's."""
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
    stored, context_size = _CACHE_TYPES[config.kv_cache_dtype], config.parallel.context_parallel_size
    return Numbers(dtype, stored, config.model.kv_channels, context_size, config.layers.window_size)


def attention_of(
    config: RLConfig, platform: Platform, faults: Mapping[str, str] = MappingProxyType({})
) -> Attention:
    """`choose`, for this model on this device."""
    return choose(config.kernels.attention_backend, facts_of(platform.device), numbers_of(config), faults)


def checked_attention(config: RLConfig, platform: Platform, layout: ModelLayout) -> Attention:
    """`attention_of`, tried out in the shapes of ``layout``; what fails on one rank is used on none. Collective.

    Nothing is tried, or exchanged, for torch's own.

    Raises:
        ConfigError: the backend that the user asked for fails.
    """
    heads = config.model.num_attention_heads // layout.tensor_size
    shape = numbers_of(config), heads, layout.layers[0].cache.heads, platform.device
    faults: dict[str, str] = {}
    while True:
        chosen = attention_of(config, platform, faults)
        found: dict[str, str | None] = {}
        if chosen.packed_name not in _PLAIN:
            found[chosen.packed_name] = fault_of_packed(chosen.packed, *shape)
        if chosen.cache_name not in _PLAIN:
            found[chosen.cache_name] = found.get(chosen.cache_name) or fault_of_cache(chosen.cache, *shape)
        if dist.is_initialized():
            elsewhere = "failed on another rank"
            found = {name: fault or elsewhere if any_rank(fault is not None) else None for name, fault in found.items()}
        if not any(found.values()):
            return chosen
        faults |= {name: fault for name, fault in found.items() if fault is not None}


def _unfit(part: PackedKernel | CacheKernel, device: DeviceFacts, numbers: Numbers) -> str | None:
    if isinstance(part, PackedKernel) and part.spans is None and numbers.context_size > 1:
        return "cannot share sequences over ranks (--context-parallel-size)"
    if numbers.window is not None and not part.windows:
        return "has no sliding windows (--window-size)"
    return part.unfit(device, numbers)


def choose(
    asked: str, device: DeviceFacts, numbers: Numbers | None = None, faults: Mapping[str, str] = MappingProxyType({})
) -> Attention:
    """``asked`` is `--attention-backend`. What a backend does not compute itself is chosen automatically.

    ``flash`` is Megatron's name of the kernel that torch has as ``varlen``.

    Without ``numbers`` whatever the model computes with is taken to fit. ``faults`` are what was wrong with backends
    that were tried (`self_check`), by name.

    Raises:
        ConfigError: there is no such backend, the device lacks it, or it does not take the model's numbers.
    """
    backends = [BACKENDS.get(name) for name in BACKENDS.names()]
    wanted = None if asked == AUTO else BACKENDS.get("varlen" if asked == "flash" else asked)

    def problem(backend: Backend, *parts: PackedKernel | CacheKernel | None) -> str | None:
        unfit = (_unfit(part, device, numbers) for part in parts if part is not None and numbers is not None)
        return backend.problem(device) or next(filter(None, unfit), None) or faults.get(backend.name)

    if wanted is not None and (fault := problem(wanted, wanted.packed, wanted.cache)) is not None:
        others = ", ".join(one.name for one in backends if problem(one, one.packed, one.cache) is None)
        text = f"--attention-backend {asked} {fault}; use auto, or {others}"
        raise ConfigError([Problem("--attention-backend", text)])
    refused: dict[str, None] = {}

    def pick(part: Literal["packed", "cache"]) -> Backend:
        if wanted is not None and getattr(wanted, part) is not None:
            return wanted
        rank = operator.attrgetter(f"{part}_rank")
        able = [backend for backend in backends if getattr(backend, part) is not None and rank(backend)]
        for backend in sorted(able, key=rank, reverse=True):
            fault = problem(backend, getattr(backend, part))
            if fault is None:
                return backend
            refused[f"{backend.name} {fault}"] = None
        raise ConfigError([f"no attention backend runs on {device.type}: {'; '.join(refused)}"])

    packed, cache = pick("packed"), pick("cache")
    why = "; ".join(["the fastest present" if wanted is None else f"--attention-backend {asked}", *refused])
    reason = f"attention: {packed.name} for packed batches, {cache.name} over the KV cache ({why})"
    return Attention(packed.name, packed.packed, cache.name, cache.cache, reason)
