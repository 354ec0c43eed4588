"""Chooses among the attention backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from megatron_rl.attention.backend import Backend, CacheKernel, DeviceFacts, Numbers, PackedKernel
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.registry import BACKENDS

AUTO = "auto"
Kernel = PackedKernel | CacheKernel


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
    if asked != AUTO:
        backend = BACKENDS.get(asked)
        parts = [part for part in (backend.packed, backend.cache) if part is not None]
        unfit = (_unfit(part, device, numbers) for part in parts)
        problem = backend.problem(device) or next(filter(None, unfit), None) or faults.get(asked)
        if problem is not None:
            others = _usable(device, numbers, faults)
            text = f"--attention-backend {asked} {problem}; use auto, or {others}"
            raise ConfigError([Problem("--attention-backend", text)])
    refused: list[str] = []

    def pick(part: Callable[[Backend], Kernel | None], rank: Callable[[Backend], int]) -> Backend:
        if asked != AUTO and part(BACKENDS.get(asked)) is not None:
            return BACKENDS.get(asked)
        candidates = [backend for backend in map(BACKENDS.get, BACKENDS.names()) if part(backend) and rank(backend)]
        for backend in sorted(candidates, key=rank, reverse=True):
            problem = backend.problem(device) or _unfit(part(backend), device, numbers) or faults.get(backend.name)
            if problem is None:
                return backend
            refused.append(f"{backend.name} {problem}")
        raise ConfigError([f"no attention backend runs on {device.type}: {'; '.join(refused)}"])

    packed = pick(lambda b: b.packed, lambda b: b.packed_rank)
    cache = pick(lambda b: b.cache, lambda b: b.cache_rank)
    return Attention(packed.name, packed.packed, cache.name, cache.cache, _reason(asked, packed, cache, refused))


def _unfit(part: Kernel, device: DeviceFacts, numbers: Numbers | None) -> str | None:
    return None if numbers is None else part.unfit(device, numbers)


def _reason(asked: str, packed: Backend, cache: Backend, refused: Iterable[str]) -> str:
    why = "the fastest present" if asked == AUTO else f"--attention-backend {asked}"
    missing = "; ".join(dict.fromkeys(refused))
    return (
        f"attention: {packed.name} for packed batches, {cache.name} over the KV cache ({why}"
        + (f"; {missing})" if missing else ")")
    )


def _usable(device: DeviceFacts, numbers: Numbers | None, faults: Mapping[str, str]) -> str:
    def runs(backend: Backend) -> bool:
        parts = (part for part in (backend.packed, backend.cache) if part is not None)
        unfit = any(_unfit(part, device, numbers) for part in parts)
        return backend.problem(device) is None and not unfit and backend.name not in faults

    return ", ".join(name for name in BACKENDS.names() if runs(BACKENDS.get(name)))
