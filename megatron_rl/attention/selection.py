"""Chooses among the attention backends."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from megatron_rl.attention.backend import Backend, CacheKernel, DeviceFacts, Numbers, PackedKernel
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.registry import BACKENDS

AUTO = "auto"


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

    def page_problems(self, page_length: int | None, overcommit: float) -> list[Problem]:
        """What the KV cache does not take: pages of that many tokens, or promising them more than once."""
        multiple = self.cache.page_multiple
        if self.cache.layout == "slots":
            text = (
                f"--rl-kv-overcommit {overcommit:g} needs a KV cache of pages, and the attention backend "
                f"{self.cache_name} keeps one of slots; leave it out, or use --attention-backend paged"
            )
            return [Problem("--rl-kv-overcommit", text)] if overcommit > 1 else []
        flag = "--inference-dynamic-batching-block-size"
        text = (
            f"{flag} {page_length} is not a multiple of {multiple}, as the pages of {self.cache_name} must be; use "
            f"{-(-(page_length or 0) // multiple) * multiple}"
        )
        return [Problem(flag, text)] if (page_length or 0) % multiple else []


def choose(
    asked: str, device: DeviceFacts, numbers: Numbers | None = None, faults: Mapping[str, str] = MappingProxyType({})
) -> Attention:
    """``asked`` is `--attention-backend`. What a backend does not compute itself is chosen automatically.

    Without ``numbers`` whatever the model computes with is taken to fit. ``faults`` are what was wrong with backends
    that were tried (`proof`), by name.

    Raises:
        ConfigError: there is no such backend, the device lacks it, or it does not take the model's numbers.
    """
    backends = [BACKENDS.get(name) for name in BACKENDS.names()]
    wanted = None if asked == AUTO else BACKENDS.get(asked)

    def problem(backend: Backend, parts: Sequence[PackedKernel | CacheKernel]) -> str | None:
        unfit = (part.unfit(device, numbers) for part in parts if numbers is not None)
        return backend.problem(device) or next(filter(None, unfit), None) or faults.get(backend.name)

    if wanted is not None and (fault := problem(wanted, wanted.parts)) is not None:
        others = ", ".join(backend.name for backend in backends if problem(backend, backend.parts) is None)
        text = f"--attention-backend {asked} {fault}; use auto, or {others}"
        raise ConfigError([Problem("--attention-backend", text)])
    refused: dict[str, None] = {}

    def pick(part: Literal["packed", "cache"]) -> Backend:
        if wanted is not None and getattr(wanted, part) is not None:
            return wanted
        rank = operator.attrgetter(f"{part}_rank")
        for backend in sorted(filter(rank, backends), key=rank, reverse=True):
            fault = problem(backend, [getattr(backend, part)])
            if fault is None:
                return backend
            refused[f"{backend.name} {fault}"] = None
        raise ConfigError([f"no attention backend runs on {device.type}: {'; '.join(refused)}"])

    packed, cache = pick("packed"), pick("cache")
    why = "; ".join(["the fastest present" if wanted is None else f"--attention-backend {asked}", *refused])
    reason = f"attention: {packed.name} for packed batches, {cache.name} over the KV cache ({why})"
    return Attention(packed.name, packed.packed, cache.name, cache.cache, reason)
