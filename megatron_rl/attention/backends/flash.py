"""flash-attn: version 3 (``flash_attn_interface``) where it is installed, else version 2 (``flash_attn``)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from megatron_rl.attention.backend import (
    Backend,
    CacheKernel,
    DeviceFacts,
    KVCache,
    NewTokens,
    PackedKernel,
    unfit_for_flash,
    unfit_for_flash_cache,
)

_THIRD, _SECOND = "flash_attn_interface", "flash_attn"
_PAGES = 256
"""Version 2 takes pages of a multiple of it."""


@functools.cache
def _installed() -> str | None:
    """Looked up, not imported: that takes seconds."""
    return next((name for name in (_THIRD, _SECOND) if importlib.util.find_spec(name) is not None), None)


def _library() -> ModuleType:
    return importlib.import_module(_installed())


@dataclass(frozen=True)
class _Packed:
    cu_seqlens: torch.Tensor
    longest: int


def _prepare_packed(lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor) -> _Packed:
    del position_ids
    return _Packed(cu_seqlens, max(lengths))


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: _Packed) -> torch.Tensor:
    borders, longest = plan.cu_seqlens, plan.longest
    out = _library().flash_attn_varlen_func(
        query[:, 0], key[:, 0], value[:, 0], borders, borders, longest, longest, causal=True
    )
    return _alone(out).flatten(1)[:, None]


@dataclass(frozen=True)
class _Decode:
    table: torch.Tensor
    lengths: torch.Tensor
    """[N] int32, the new token included."""


def _prepare_decode(cache: KVCache, positions: torch.Tensor, key_length: int) -> _Decode:
    del key_length
    return _Decode(cache.table[: positions.shape[0]], (positions + 1).int())


def _decode(query: torch.Tensor, cache: KVCache, layer: int, plan: _Decode) -> torch.Tensor:
    table = {"page_table" if _installed() == _THIRD else "block_table": plan.table}
    out = _library().flash_attn_with_kvcache(
        query, cache.keys[layer], cache.values[layer], cache_seqlens=plan.lengths, causal=True, **table
    )
    return _alone(out).flatten(2)


@dataclass(frozen=True)
class _Extend:
    table: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int
    key_lengths: torch.Tensor
    """[S] int32, the new tokens included."""
    key_length: int


def _prepare_extend(cache: KVCache, new: NewTokens) -> _Extend:
    last = new.position_ids.index_select(0, new.cu_seqlens[1:].long() - 1)
    return _Extend(
        cache.table.index_select(0, new.slots), new.cu_seqlens, max(new.lengths), (last + 1).int(), new.key_length
    )


def _extend(query: torch.Tensor, cache: KVCache, layer: int, plan: _Extend) -> torch.Tensor:
    keys, values = cache.keys[layer], cache.values[layer]
    if _installed() == _THIRD:
        out = _library().flash_attn_with_kvcache(
            query[:, 0], keys, values, cache_seqlens=plan.key_lengths, page_table=plan.table,
            cu_seqlens_q=plan.cu_seqlens, max_seqlen_q=plan.longest, causal=True,
        )  # fmt: skip
    else:
        key_borders = torch.nn.functional.pad(plan.key_lengths.cumsum(0, dtype=torch.int32), (1, 0))
        out = _library().flash_attn_varlen_func(
            query[:, 0], keys, values, plan.cu_seqlens, key_borders, plan.longest, plan.key_length, causal=True,
            block_table=plan.table,
        )  # fmt: skip
    return _alone(out).flatten(1)[:, None]


def _alone(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Early releases of version 3 return the log-sum-exp as well."""
    return out[0] if isinstance(out, tuple) else out


def _problem(device: DeviceFacts) -> str | None:
    if device.type != "cuda":
        return "needs a CUDA device"
    if _installed() is None:
        return "needs flash-attn, which is not installed"
    if device.capability is not None and device.capability < (8, 0):
        return "needs a GPU of capability 8.0 or later"
    return None


BACKEND = Backend(
    name="flash",
    problem=_problem,
    packed=PackedKernel(_prepare_packed, _packed, unfit=unfit_for_flash),
    cache=CacheKernel(
        layout="pages",
        page_multiple=_PAGES,
        page_length=_PAGES,
        prepare_decode=_prepare_decode,
        decode=_decode,
        prepare_extend=_prepare_extend,
        extend=_extend,
        needs_key_length=False,
        unfit=unfit_for_flash_cache,
    ),
    packed_rank=3,
    cache_rank=4,
)
