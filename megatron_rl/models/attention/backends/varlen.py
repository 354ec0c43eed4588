"""torch's flash kernel for concatenated sequences; from torch 2.13 on also for a paged KV cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl.algorithms.context import Share
from megatron_rl.models.attention.backend import (
    Backend,
    CacheKernel,
    DeviceFacts,
    KVCache,
    NewTokens,
    PackedKernel,
    Requirements,
    SpanKernel,
)

_PAGES = 256
"""Block sizes must be a multiple."""
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The kernel with all arguments except query, keys and values."""


@functools.cache
def kernel() -> Callable[..., torch.Tensor]:
    """Return torch's kernel for grouped key heads. Imported on first use, which takes seconds."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn  # of torch 2.11, which does not ask


def backend(has_pages: bool) -> Backend:
    """Return the backend. Kernels of older torch versions take no block table: then it has no cache kernel."""
    cache = CacheKernel(
        "blocks", _prepare_decode, _attend_cached, _prepare_extend, _attend_cached, block_multiple=_PAGES,
        needs_key_length=False, unsupported=cache_unsupported, windows=True,
    )  # fmt: skip
    packed = PackedKernel(_whole_sequences, _attend, unsupported, SpanKernel(_spans, _attend), windows=True)
    return Backend("varlen", _problem, packed, cache if has_pages else None, 2, 2)


def _call(window: int | None, **arguments: Any) -> Call:
    seen = (-1 if window is None else window - 1, 0)  # keys before the token, -1 for all, and behind it
    return functools.partial(kernel(), window_size=seen, **arguments)


def _whole_sequences(
    lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor, window: int | None = None
) -> Call:
    longest = max(lengths)
    return _call(window, cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=longest, max_k=longest)


def _spans(share: Share, window: int | None = None) -> Call:
    """Prepare spans: the kernel aligns the causal mask at the end of each span's keys (lower right)."""
    return _call(
        window, cu_seq_q=share.query_borders, cu_seq_k=share.key_borders,
        max_q=max(share.query_lengths), max_k=max(share.key_lengths),
    )  # fmt: skip


def _prepare_decode(cache: KVCache, positions: torch.Tensor, key_length: int, window: int | None = None) -> Call:
    rows = positions.shape[0]
    borders = torch.arange(rows + 1, dtype=torch.int32, device=positions.device)
    table, lengths = cache.table[:rows], (positions + 1).int()
    return _call(window, cu_seq_q=borders, max_q=1, **_pages(cache, table, lengths))


def _prepare_extend(cache: KVCache, new: NewTokens, window: int | None = None) -> Call:
    last = new.position_ids.index_select(0, new.cu_seqlens[1:].long() - 1)
    table, lengths = cache.table.index_select(0, new.rows), (last + 1).int()
    return _call(window, cu_seq_q=new.cu_seqlens, max_q=max(new.lengths), **_pages(cache, table, lengths))


def _pages(cache: KVCache, table: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for a paged cache, with one split: otherwise the split would depend on the batch."""
    longest = table.shape[1] * cache.block_size
    return {"cu_seq_k": None, "max_k": longest, "seqused_k": lengths, "block_table": table, "num_splits": 1}


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    # squeeze: the gradient of an index is copied into a zero tensor. Query gradients are summed by atomics, except in
    # torch's deterministic mode.
    return call(query.squeeze(1), key.squeeze(1), value.squeeze(1)).flatten(1)[:, None]


def _attend_cached(query: torch.Tensor, cache: KVCache, layer: int, call: Call) -> torch.Tensor:
    return call(query[:, 0], cache.keys[layer], cache.values[layer]).flatten(1)[:, None]


def _problem(device: DeviceFacts) -> str | None:
    if device.type != "cuda":
        return "needs a CUDA device"
    if device.capability is not None and device.capability < (8, 0):
        return "needs a GPU of capability 8.0 or later"
    return None


def unsupported(device: DeviceFacts, needed: Requirements) -> str | None:
    width = needed.head_width
    if width > 256 or width % 8:
        return f"takes heads of up to 256 numbers in multiples of 8, not of {width}"
    if needed.dtype not in (torch.bfloat16, torch.float16):
        return "computes in 16 bits only (--bf16)"
    return None


def cache_unsupported(device: DeviceFacts, needed: Requirements) -> str | None:
    """See `CacheKernel.unsupported`."""
    if needed.cache_dtype != needed.dtype:
        return "reads a KV cache in the model's own numbers only (--rl-kv-cache-dtype auto)"
    return unsupported(device, needed)


BACKEND = backend(has_pages=torch.__version__ >= (2, 13))
