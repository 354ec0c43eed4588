"""Our Triton kernels over a paged cache; E4M3 codes are read directly."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatron_rl.models.attention.backend import Backend, CacheKernel, DeviceFacts, KVCache, NewTokens, Requirements
from megatron_rl.models.attention.kv_format import FP8

if TYPE_CHECKING:
    from megatron_rl.models.attention.kernels import Splits

WIDEST_HEAD = 256
WIDEST_FP32_HEAD = 64
"""In fp32, heads of 128 spill thousands of loads, and heads of 256 exceed the shared memory."""
_FP8_CAPABILITY = (8, 9)


def _prepare_decode(
    cache: KVCache, positions: torch.Tensor, key_length: int, window: int | None = None, invariant: bool = False
) -> Splits:
    from megatron_rl.models.attention.kernels import find_splits

    longest, groups = cache.table.shape[1] * cache.block_size, cache.keys[0].shape[2]
    return find_splits(positions, longest, groups, window, invariant)


def _decode(query: torch.Tensor, cache: KVCache, layer: int, plan: Splits, *sinks: torch.Tensor) -> torch.Tensor:
    from megatron_rl.models.attention.kernels import decode

    stored = cache.keys[layer], cache.values[layer], cache.table
    return decode(query, *stored, plan, cache.format.scales(layer), *sinks)


def _prepare_extend(
    cache: KVCache, new: NewTokens, window: int | None = None, invariant: bool = False
) -> Callable[..., torch.Tensor]:
    """Return `extend.extend` with the arguments that all layers share."""
    from megatron_rl.models.attention.extend import extend

    return functools.partial(
        extend, table=cache.table.index_select(0, new.rows), cu_seqlens=new.cu_seqlens,
        first_positions=new.position_ids.index_select(0, new.cu_seqlens[:-1].long()), longest=max(new.lengths),
        window=window, invariant=invariant,
    )  # fmt: skip


def _extend(
    query: torch.Tensor, cache: KVCache, layer: int, call: Callable[..., torch.Tensor],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return call(query, cache.keys[layer], cache.values[layer], scales=cache.format.scales(layer), sinks=sinks)


def _problem(device: DeviceFacts) -> str | None:
    """On a CPU only Triton's interpreter runs them, for tests (TRITON_INTERPRET=1 before Triton's import)."""
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return None if runs else "needs a CUDA device"


def _unsupported(device: DeviceFacts, needed: Requirements) -> str | None:
    width = needed.head_width
    if width > WIDEST_HEAD:
        return f"takes heads of up to {WIDEST_HEAD} numbers, not of {width}"
    if needed.dtype == torch.float32 and width > WIDEST_FP32_HEAD and device.type == "cuda":
        return f"takes heads of up to {WIDEST_FP32_HEAD} numbers in fp32, not of {width} (--bf16: up to 256)"
    if needed.cache_dtype == FP8 and device.capability is not None and device.capability < _FP8_CAPABILITY:
        return "reads an fp8 cache on GPUs of capability 8.9 and later only"
    return None


BACKEND = Backend(
    name="triton_paged",
    problem=_problem,
    packed=None,
    cache=CacheKernel(
        "blocks", _prepare_decode, _decode, _prepare_extend, _extend, block_multiple=16, needs_key_length=False,
        unsupported=_unsupported, windows=True, sinks=True,
    ),
    cache_rank=3,
)
