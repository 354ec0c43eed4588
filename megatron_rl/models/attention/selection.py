"""Chooses attention backends by flags and device, and tests them before use.

The self-check compares small batches with plain torch, on the run's device and dtypes. It finds incompatible library
versions and miscompiled kernels in milliseconds, before they show as a policy that learns nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.families import ModelLayout
from megatron_rl.families.layout import cache_of
from megatron_rl.models.attention.backend import (
    BACKENDS,
    Backend,
    CacheKernel,
    DeviceFacts,
    KVCache,
    NewTokens,
    PackedKernel,
    Requirements,
    SpanKernel,
)
from megatron_rl.models.attention.backends import paged, sdpa
from megatron_rl.models.attention.kv_format import FP8, KVFormat
from megatron_rl.models.attention.plan import prepared_for
from megatron_rl.platform import Platform
from megatron_rl.platform.collectives import any_rank

AUTO = "auto"
_INVARIANT = "invariant"
_PLAIN = ("sdpa", "paged")
"""Plain torch: the reference of the self-check."""
_CACHE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""For outputs of about 1: kernels round and sum in another order."""


def facts_of(device: torch.device) -> DeviceFacts:
    """Return the device facts that backends use."""
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
    """One line for the log: the choice, and why others were not chosen."""

    def block_problems(self, block_size: int | None, overcommit: float) -> list[Problem]:
        """Return the problems of this block size and overcommit with the KV cache."""
        multiple = self.cache.block_multiple
        if self.cache.layout == "rows":
            text = (
                f"--rl-kv-overcommit {overcommit:g} needs a KV cache of pages, and the attention backend "
                f"{self.cache_name} keeps one of slots; leave it out, or use --attention-backend paged"
            )
            return [Problem("--rl-kv-overcommit", text)] if overcommit > 1 else []
        if block_size is None or block_size % multiple == 0:
            return []
        flag = "--inference-dynamic-batching-block-size"
        text = (
            f"{flag} {block_size} is not a multiple of {multiple}, as the pages of {self.cache_name} must be; use "
            f"{-(-block_size // multiple) * multiple}"
        )
        return [Problem(flag, text)]


def requirements_of(config: RLConfig) -> Requirements:
    """Derive the kernel requirements from the flags."""
    shape = config.architecture()
    attending = next((kind for kind in shape.kinds if kind.mixer != "delta"), shape.kinds[0])
    cache = cache_of(attending, shape, config.parallel.tensor_model_parallel_size)
    return Requirements(
        dtype=torch.bfloat16 if config.precision.bf16 else torch.float32,
        cache_dtype=_CACHE_DTYPES[config.kv_cache_dtype],
        head_width=cache.key_width,
        spans=config.parallel.context_parallel_size > 1 or config.training.rl_share_prompts,
        window=config.layers.window_size,
        sinks=config.layers.softmax_type == "learnable",
        latents=config.latent.multi_latent_attention,
        invariant=config.kernels.batch_invariant_mode,
    )


def attention_of(config: RLConfig, platform: Platform, faults: Mapping[str, str] = MappingProxyType({})) -> Attention:
    """Choose the backends for this model and device."""
    return choose(config.kernels.attention_backend, facts_of(platform.device), requirements_of(config), faults)


def checked_attention(config: RLConfig, platform: Platform, layout: ModelLayout) -> Attention:
    """Choose backends and self-check them in the shapes of ``layout``; one that fails on any rank is not used.
    Collective.

    Plain torch is not checked.

    Raises:
        ConfigError: the requested backend fails.
    """
    heads = config.model.num_attention_heads // layout.tensor_size
    shape = requirements_of(config), heads, layout.key_layers[0].cache.heads, platform.device
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


def choose(
    asked: str,
    device: DeviceFacts,
    needed: Requirements | None = None,
    faults: Mapping[str, str] = MappingProxyType({}),
) -> Attention:
    """Choose the backends; ``asked`` is `--attention-backend`. A part that it lacks is chosen automatically.

    ``flash`` is Megatron's name of torch's ``varlen``. Without ``needed`` every backend fits the model. ``faults``:
    backend name -> failure of the self-check.

    Raises:
        ConfigError: an unknown or unsupported backend, or one that does not fit the model.
    """
    backends = [BACKENDS.get(name) for name in BACKENDS.names()]
    named = f"--attention-backend {asked}"
    if needed is not None and needed.invariant and device.type == "cuda":
        if asked not in (AUTO, _INVARIANT):
            text = f"{named} gives rollouts other bits than training; leave it out beside --batch-invariant-mode"
            raise ConfigError([Problem("--attention-backend", text)])
        named, asked = "--batch-invariant-mode", _INVARIANT
    wanted = None if asked == AUTO else BACKENDS.get("varlen" if asked == "flash" else asked)

    def problem(backend: Backend, *parts: PackedKernel | CacheKernel | None) -> str | None:
        unsupported = (_unsupported(part, device, needed) for part in parts if part is not None and needed is not None)
        return backend.problem(device) or next(filter(None, unsupported), None) or faults.get(backend.name)

    if wanted is not None and (fault := problem(wanted, wanted.packed, wanted.cache)) is not None:
        others = ", ".join(one.name for one in backends if problem(one, one.packed, one.cache) is None)
        fix = "leave it out" if asked == _INVARIANT else f"use auto, or {others}"
        raise ConfigError([Problem(named.split()[0], f"{named} {fault}; {fix}")])
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
    why = "; ".join(["the fastest present" if wanted is None else named, *refused])
    reason = f"attention: {packed.name} for packed batches, {cache.name} over the KV cache ({why})"
    return Attention(packed.name, packed.packed, cache.name, cache.cache, reason)


def _unsupported(part: PackedKernel | CacheKernel, device: DeviceFacts, needed: Requirements) -> str | None:
    if isinstance(part, PackedKernel) and part.spans is None and needed.spans:
        return "computes whole sequences only (--context-parallel-size, --rl-share-prompts)"
    if needed.window is not None and not part.windows:
        return "has no sliding windows (--window-size)"
    if needed.sinks and not part.sinks:
        return "has no attention sinks (--softmax-type learnable)"
    if needed.latents and not part.latents:
        return "takes values of the width of keys only (--multi-latent-attention)"
    return part.unsupported(device, needed)


# -- the self-check ----------------------------------------------------------------------------


def fault_of_packed(
    kernel: PackedKernel, needed: Requirements, heads: int, groups: int, device: torch.device
) -> str | None:
    """Self-check a kernel for packed batches; return the failure as a phrase after its name, or None."""
    lengths, plain = (1, 37, 64, 5), sdpa.BACKEND.packed
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    inputs = _random(sum(lengths), (heads, groups, groups), needed, device)
    fault = _fault_of_batch(kernel, plain, (lengths, borders, positions), inputs, needed)
    if fault is not None or not needed.spans:
        return fault
    # Spans: is the causal mask aligned at the lower right?
    share = ContextShare.of((1, 37, 64, 6), rank=1, size=2, device=device)
    queries = _random(share.local.numel(), (heads,), needed, device)
    keys = _random(share.keys.numel(), (groups, groups), needed, device)
    return _fault_of_batch(kernel.spans, plain.spans, (share,), (*queries, *keys), needed)


def _fault_of_batch(
    kernel: PackedKernel | SpanKernel, twin: PackedKernel | SpanKernel, batch: tuple[Any, ...],
    inputs: tuple[torch.Tensor, ...], needed: Requirements,
) -> str | None:  # fmt: skip
    """``batch``: arguments of ``prepare``; ``inputs``: query, key and value."""
    sinks = _sinks(needed, inputs[0].shape[2], inputs[0].device)

    def run(tried: PackedKernel | SpanKernel) -> torch.Tensor:
        plans = [prepared_for(window, tried.prepare, *batch) for window in _windows(needed)]
        return torch.cat([tried.attend(*inputs, plan, *sinks) for plan in plans])

    return _compared(run, kernel, twin, needed.dtype)


def _windows(needed: Requirements) -> tuple[int | None, ...]:
    """Return the windows to test: None, and one that the small batches exceed."""
    return (None,) if needed.window is None else (None, min(needed.window, 16))


def _sinks(needed: Requirements, heads: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return test sinks from -2 to 2, or none."""
    return (torch.linspace(-2, 2, heads).to(device, needed.dtype),) if needed.sinks else ()


def fault_of_cache(
    kernel: CacheKernel, needed: Requirements, heads: int, groups: int, device: torch.device
) -> str | None:
    """Self-check a kernel over pages, like `fault_of_packed`: decode and extend."""
    page = kernel.block_size
    lengths = (1, page + 3, 3 * page, 2 * page - 1)
    cache = _filled(lengths, page, needed, groups, device)
    positions = torch.tensor(lengths, device=device) - 1
    (query,) = _random(len(lengths), (heads,), needed, device)
    new = _new_tokens(lengths, device)
    (queries,) = _random(new.position_ids.numel(), (heads,), needed, device)
    sinks = _sinks(needed, heads, device)

    def run(tried: CacheKernel) -> torch.Tensor:
        found = []
        for window in _windows(needed):
            decode = prepared_for(window, tried.prepare_decode, cache, positions, max(lengths))
            extend = prepared_for(window, tried.prepare_extend, cache, new)
            found.append(tried.decode(query, cache, 0, decode, *sinks))
            found.append(tried.extend(queries, cache, 0, extend, *sinks))
        return torch.cat(found)

    return _compared(run, kernel, paged.BACKEND.cache, needed.dtype)


@torch.no_grad()
def _compared(run: Callable[[Any], torch.Tensor], kernel: Any, twin: Any, dtype: torch.dtype) -> str | None:
    expected = run(twin).float()
    try:
        difference = (run(kernel).float() - expected).abs().max().item()
    except Exception as error:  # noqa: BLE001 - whatever a library or a compiler raises, the run can do without it
        first_line = str(error).strip().partition("\n")[0]
        return f"fails here ({type(error).__name__}: {first_line})"
    if difference <= _TOLERANCE[dtype]:
        return None
    return f"computes something else here: {difference:.2g} off plain torch"


def _random(
    tokens: int, heads: tuple[int, ...], needed: Requirements, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return random ``[tokens, 1, heads, D]`` tensors, the same on every rank; leaves torch's generators alone."""
    generator = torch.Generator().manual_seed(tokens)
    return tuple(
        torch.randn(tokens, 1, count, needed.head_width, generator=generator).to(device, needed.dtype)
        for count in heads
    )


def _filled(lengths: tuple[int, ...], page: int, needed: Requirements, groups: int, device: torch.device) -> KVCache:
    """Return a cache of one layer with sequences of ``lengths``, in pages in reverse order; page 0 is unused."""
    width = -(-max(lengths) // page)
    count = len(lengths) * width
    table = torch.arange(count, 0, -1, dtype=torch.int32, device=device).view(len(lengths), width)
    kv_format = KVFormat(1, groups, needed.dtype, needed.cache_dtype, device)
    key, value = _random((count + 1) * page, (groups, groups), needed, device)
    kv_format.calibrate(0, key, value)
    keys, values = (
        [rows.view(count + 1, page, groups, needed.head_width).contiguous()] for rows in kv_format.pack(0, key, value)
    )
    return SimpleNamespace(
        keys=keys, values=values, dtype=needed.dtype, max_length=width * page, format=kv_format, table=table,
        block_size=page,
    )  # fmt: skip


def _new_tokens(lengths: tuple[int, ...], device: torch.device) -> NewTokens:
    """Return the last tokens of each sequence, at most seven."""
    news = [min(length, 7) for length in lengths]
    positions = [torch.arange(length - new, length, device=device) for length, new in zip(lengths, news, strict=True)]
    return NewTokens(
        rows=torch.arange(len(lengths), device=device),
        lengths=news,
        cu_seqlens=torch.tensor([0, *news], device=device).cumsum(0).int(),
        position_ids=torch.cat(positions),
        key_length=max(lengths),
    )
