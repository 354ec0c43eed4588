"""Attention over a paged cache in plain torch, on every device: gathers a slot's pages, then the written-out product.

The twin that the kernels over pages are compared with, and the way to run the paged scheduler without a GPU.
It copies the keys and values it reads, so it is never chosen automatically.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.attention.backend import Backend, CacheKernel, KVCache, NewTokens, anywhere
from megatron_rl.attention.padded import PaddedRows
from megatron_rl.attention.product import attend_heads, attend_one_token, hide_later_keys


@dataclass(frozen=True)
class _Plan:
    pages: torch.Tensor
    """[N, pages that reach key_length] int64."""
    mask: torch.Tensor
    """Additive, over the keys of those pages."""
    rows: PaddedRows | None = None


def _prepare_decode(cache: KVCache, positions: torch.Tensor, key_length: int) -> _Plan:
    pages = _pages(cache, cache.table[: positions.shape[0]], key_length)
    return _Plan(pages, hide_later_keys(positions, pages.shape[1] * cache.page_length, cache.dtype)[:, None, None])


def _decode(query: torch.Tensor, cache: KVCache, layer: int, plan: _Plan) -> torch.Tensor:
    return attend_one_token(query, *_gathered(cache, layer, plan.pages), plan.mask)


def _prepare_extend(cache: KVCache, new: NewTokens) -> _Plan:
    rows = PaddedRows.build(new.lengths, new.cu_seqlens, new.offsets)
    pages = _pages(cache, cache.table.index_select(0, new.slots), new.key_length)
    keys = pages.shape[1] * cache.page_length
    mask = hide_later_keys(new.position_ids.index_select(0, rows.gather), keys, cache.dtype)
    return _Plan(pages, mask.view(rows.count, 1, rows.longest, keys), rows)


def _extend(query: torch.Tensor, cache: KVCache, layer: int, plan: _Plan) -> torch.Tensor:
    keys, values = _gathered(cache, layer, plan.pages)
    return plan.rows.unpad(attend_heads(plan.rows.pad(query), keys, values, plan.mask))


def _pages(cache: KVCache, table: torch.Tensor, key_length: int) -> torch.Tensor:
    return table[:, : -(-key_length // cache.page_length)].long()


def _gathered(cache: KVCache, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[N, groups, pages * page_length, D]``."""
    stored = (buffer[layer][pages].flatten(1, 2).transpose(1, 2) for buffer in (cache.keys, cache.values))
    return cache.numbers.unpack(layer, *stored)


BACKEND = Backend("paged", anywhere, None, CacheKernel("pages", _prepare_decode, _decode, _prepare_extend, _extend))
