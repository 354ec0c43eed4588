"""torch's scaled_dot_product_attention, on every device, over slots.

A packed batch is laid out as padded rows for the product, sequences of similar length together, and packed again
after it, so the mask is causal per sequence and never T x T over the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from megatron_rl.attention.backend import Backend, CacheKernel, KVCache, NewTokens, PackedKernel, anywhere
from megatron_rl.attention.padded import Buckets, PaddedRows
from megatron_rl.attention.product import attend_heads, attend_one_token, hide_later_keys

EXPLICIT_LENGTH = 256
"""Longest row for which the CPU spells the product out; beyond it the flash kernel wins time and memory."""


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buckets: Buckets
) -> torch.Tensor:
    """See `PackedKernel.attend`."""
    if len(buckets.rows) == 1:
        return padded_attention(query, key, value, buckets.rows[0])
    # split and cat: the gradient of a slice would be a zeroed copy of the whole for every bucket.
    parts = (packed.split(buckets.tokens) for packed in (query, key, value))
    return torch.cat([padded_attention(*part) for part in zip(*parts, buckets.rows, strict=True)])


def padded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PaddedRows
) -> torch.Tensor:
    """One bucket, ``[T, 1, heads, D]`` -> ``[T, 1, heads * D]``.

    A padding cell is a copy of token 0 behind the sequence's end: causality keeps it from every
    real token, and its own output is never gathered.
    """
    padded = rows.pad(query), rows.pad(key), rows.pad(value)
    if query.device.type == "cpu" and rows.longest <= EXPLICIT_LENGTH:
        mask = torch.full((rows.longest, rows.longest), float("-inf"), dtype=query.dtype).triu(1)
        return rows.unpad(attend_heads(*padded, mask))
    output = functional.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True)
    return rows.unpad(output)


@dataclass(frozen=True)
class _Decode:
    key_length: int
    mask: torch.Tensor
    """[N, 1, 1, key_length], 0 or -inf."""


def _prepare_decode(cache: KVCache, positions: torch.Tensor, key_length: int) -> _Decode:
    return _Decode(key_length, hide_later_keys(positions, key_length, cache.dtype)[:, None, None])


def _prepare_burst(cache: KVCache, positions: torch.Tensor, key_length: int) -> Iterator[_Decode]:
    """One mask for all steps: each uncovers one key more. Idle rows may lie beyond all keys; nobody reads theirs."""
    steps, longest = positions.shape[0], cache.max_length
    reach = min(key_length + steps - 1, longest)
    mask = hide_later_keys(positions[0], reach, cache.dtype)[:, None, None]
    for step, at in enumerate(positions):
        if step:
            mask.scatter_(-1, at.clamp_max(reach - 1)[:, None, None, None], 0.0)
        length = min(key_length + step, longest)
        yield _Decode(length, mask[..., :length])


def _decode(query: torch.Tensor, cache: KVCache, layer: int, plan: _Decode) -> torch.Tensor:
    rows = query.shape[0]
    keys = cache.keys[layer].narrow(0, 0, rows).narrow(2, 0, plan.key_length)
    values = cache.values[layer].narrow(0, 0, rows).narrow(2, 0, plan.key_length)
    return attend_one_token(query, *cache.numbers.unpack(layer, keys, values), plan.mask)


@dataclass(frozen=True)
class _Extend:
    rows: PaddedRows
    slots: torch.Tensor
    key_length: int
    mask: torch.Tensor
    """[S, 1, longest, key_length], 0 or -inf."""


def _prepare_extend(cache: KVCache, new: NewTokens) -> _Extend:
    rows = PaddedRows.build(new.lengths, new.cu_seqlens, new.offsets)
    positions = new.position_ids.index_select(0, rows.gather)
    mask = hide_later_keys(positions, new.key_length, cache.dtype).view(rows.count, 1, rows.longest, new.key_length)
    return _Extend(rows, new.slots, new.key_length, mask)


def _extend(query: torch.Tensor, cache: KVCache, layer: int, plan: _Extend) -> torch.Tensor:
    keys = cache.keys[layer][:, :, : plan.key_length].index_select(0, plan.slots)
    values = cache.values[layer][:, :, : plan.key_length].index_select(0, plan.slots)
    read = cache.numbers.unpack(layer, keys, values)
    return plan.rows.unpad(attend_heads(plan.rows.pad(query), *read, plan.mask))


BACKEND = Backend(
    name="sdpa",
    problem=anywhere,
    packed=PackedKernel(Buckets.build, packed_attention),
    cache=CacheKernel("slots", _prepare_decode, _decode, _prepare_extend, _extend, prepare_burst=_prepare_burst),
    packed_rank=1,
    cache_rank=1,
)
