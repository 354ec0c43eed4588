"""The self-check of kernels before they are used: small batches against plain torch, on the run's device and numbers.

A library of another version, or a compiler that makes something else of a kernel on a new GPU, shows here, in
milliseconds, and not as a policy that learns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.models.attention.backend import CacheKernel, KVCache, NewTokens, Numbers, PackedKernel
from megatron_rl.models.attention.backends import paged, sdpa
from megatron_rl.models.attention.kv_numbers import KVNumbers

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Of outputs of about 1: the kernels round and add up in other places."""


def fault_of_packed(
    kernel: PackedKernel, numbers: Numbers, heads: int, groups: int, device: torch.device
) -> str | None:
    """What is wrong with a kernel for packed batches, in words that follow its name; None if nothing is."""
    lengths = (1, 37, 64, 5)
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    inputs = _random(sum(lengths), (heads, groups, groups), numbers, device)

    def run(tried: PackedKernel) -> torch.Tensor:
        plans = (tried.plan(lengths, borders, positions, window) for window in _windows(numbers))
        return torch.cat([tried.attend(*inputs, plan) for plan in plans])

    fault = _compared(lambda: run(kernel), lambda: run(sdpa.BACKEND.packed), numbers.dtype)
    return fault or (_fault_of_spans(kernel, numbers, heads, groups, device) if numbers.context_size > 1 else None)


def _windows(numbers: Numbers) -> tuple[int | None, ...]:
    """None for layers without one, and one that the small batches exceed."""
    return (None,) if numbers.window is None else (None, min(numbers.window, 16))


def _fault_of_spans(
    kernel: PackedKernel, numbers: Numbers, heads: int, groups: int, device: torch.device
) -> str | None:
    """The same of what a context-parallel rank computes: is the causal mask aligned at the lower right?"""
    share = ContextShare.of((1, 37, 64, 6), rank=1, size=2, device=device)
    (query,) = _random(share.local.numel(), (heads,), numbers, device)
    key, value = _random(share.keys.numel(), (groups, groups), numbers, device)

    def run(tried: PackedKernel) -> torch.Tensor:
        plans = (tried.spans.plan(share, window) for window in _windows(numbers))
        return torch.cat([tried.spans.attend(query, key, value, plan) for plan in plans])

    return _compared(lambda: run(kernel), lambda: run(sdpa.BACKEND.packed), numbers.dtype)


def fault_of_cache(
    kernel: CacheKernel, numbers: Numbers, heads: int, groups: int, device: torch.device
) -> str | None:
    """The same for a kernel over pages: one new token a row, and several."""
    page = kernel.block_size
    lengths = (1, page + 3, 3 * page, 2 * page - 1)
    cache = _filled(lengths, page, numbers, groups, device)
    positions = torch.tensor(lengths, device=device) - 1
    (query,) = _random(len(lengths), (heads,), numbers, device)
    new = _new_tokens(lengths, device)
    (queries,) = _random(new.position_ids.numel(), (heads,), numbers, device)

    def run(tried: CacheKernel) -> torch.Tensor:
        found = []
        for given in [() if window is None else (window,) for window in _windows(numbers)]:
            found.append(tried.decode(query, cache, 0, tried.prepare_decode(cache, positions, max(lengths), *given)))
            found.append(tried.extend(queries, cache, 0, tried.prepare_extend(cache, new, *given)))
        return torch.cat(found)

    return _compared(lambda: run(kernel), lambda: run(paged.BACKEND.cache), numbers.dtype)


@torch.no_grad()
def _compared(
    ours: Callable[[], torch.Tensor], twin: Callable[[], torch.Tensor], dtype: torch.dtype
) -> str | None:
    expected = twin().float()
    try:
        difference = (ours().float() - expected).abs().max().item()
    except Exception as error:  # noqa: BLE001 - whatever a library or a compiler raises, the run can do without it
        first_line = str(error).strip().partition("\n")[0]
        return f"fails here ({type(error).__name__}: {first_line})"
    if difference <= _TOLERANCE[dtype]:
        return None
    return f"computes something else here: {difference:.2g} off plain torch"


def _random(
    tokens: int, heads: tuple[int, ...], numbers: Numbers, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """``[tokens, 1, heads, width]`` each, the same numbers on every rank; the run's own generators are not touched."""
    generator = torch.Generator().manual_seed(tokens)
    return tuple(
        torch.randn(tokens, 1, count, numbers.width, generator=generator).to(device, numbers.dtype) for count in heads
    )


def _filled(lengths: tuple[int, ...], page: int, numbers: Numbers, groups: int, device: torch.device) -> KVCache:
    """One layer, sequences of ``lengths`` in pages that lie in reverse; page 0 is nobody's."""
    width = -(-max(lengths) // page)
    count = len(lengths) * width
    table = torch.arange(count, 0, -1, dtype=torch.int32, device=device).view(len(lengths), width)
    kept = KVNumbers(1, groups, numbers.dtype, numbers.stored, device)
    key, value = _random((count + 1) * page, (groups, groups), numbers, device)
    kept.calibrate(0, key, value)
    stored = (rows.view(count + 1, page, groups, numbers.width).contiguous() for rows in kept.pack(0, key, value))
    keys, values = ([rows] for rows in stored)
    return SimpleNamespace(
        keys=keys, values=values, dtype=numbers.dtype, max_length=width * page, numbers=kept, table=table,
        block_size=page,
    )  # fmt: skip


def _new_tokens(lengths: tuple[int, ...], device: torch.device) -> NewTokens:
    """The last tokens of each sequence, seven at most."""
    news = [min(length, 7) for length in lengths]
    positions = [torch.arange(length - new, length, device=device) for length, new in zip(lengths, news, strict=True)]
    return NewTokens(
        rows=torch.arange(len(lengths), device=device),
        lengths=news,
        cu_seqlens=torch.tensor([0, *news], device=device).cumsum(0).int(),
        offsets=torch.cat([torch.arange(new, device=device) for new in news]),
        position_ids=torch.cat(positions),
        key_length=max(lengths),
    )
