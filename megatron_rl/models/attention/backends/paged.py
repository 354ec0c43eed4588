"""Attention over a paged cache in plain torch, on every device: gathers a row's blocks, then multiplies.

The reference for the paged kernels, and the way to run the paged scheduler without a GPU. It copies the keys and values
it reads, so it is never chosen automatically.
"""

from __future__ import annotations

import torch

from megatron_rl.models.attention.backend import Backend, CacheKernel, KVCache, NewTokens, no_problem
from megatron_rl.models.attention.backends.sdpa import CachePlan, plan_decode, plan_extend


def _prepare_decode(cache: KVCache, positions: torch.Tensor, key_length: int, window: int | None = None) -> CachePlan:
    pages = _pages(cache, cache.table[: positions.shape[0]], key_length)
    return plan_decode(pages, positions, pages.shape[1] * cache.block_size, cache.dtype, window)


def _prepare_extend(cache: KVCache, new: NewTokens, window: int | None = None) -> CachePlan:
    pages = _pages(cache, cache.table.index_select(0, new.rows), new.key_length)
    return plan_extend(pages, new, pages.shape[1] * cache.block_size, cache.dtype, window)


def _pages(cache: KVCache, table: torch.Tensor, key_length: int) -> torch.Tensor:
    """Return the block numbers up to ``key_length``, [N, pages] int64."""
    return table[:, : -(-key_length // cache.block_size)].long()


def _attend(query: torch.Tensor, cache: KVCache, layer: int, plan: CachePlan, *sinks: torch.Tensor) -> torch.Tensor:
    kept = (stored[layer][plan.where].flatten(1, 2).transpose(1, 2) for stored in (cache.keys, cache.values))
    return plan.attend(query, *cache.format.unpack(layer, *kept), *sinks)


BACKEND = Backend(
    "paged", no_problem, None,
    CacheKernel("blocks", _prepare_decode, _attend, _prepare_extend, _attend, windows=True, sinks=True, latents=True),
)
