"""torch's own flash kernel for sequences laid end to end (``torch.nn.attention.varlen``), paged since torch 2.13."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

_MODULE = "torch.nn.attention.varlen"
_CAUSAL = (-1, 0)
_PAGES = 256
"""The flash kernel takes pages of a multiple of it."""


def _varlen_attn() -> Callable[..., torch.Tensor]:
    return importlib.import_module(_MODULE).varlen_attn


@functools.cache
def _is_paged() -> bool:
    if importlib.util.find_spec(_MODULE) is None:
        return False
    return "block_table" in inspect.signature(_varlen_attn()).parameters


@dataclass(frozen=True)
class _Packed:
    cu_seqlens: torch.Tensor
    longest: int


def _prepare_packed(lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor) -> _Packed:
    del position_ids
    return _Packed(cu_seqlens, max(lengths))


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: _Packed) -> torch.Tensor:
    borders, longest = plan.cu_seqlens, plan.longest
    out = _varlen_attn()(
        query[:, 0], key[:, 0], value[:, 0], borders, borders, longest, longest, window_size=_CAUSAL, enable_gqa=True
    )
    return out.flatten(1)[:, None]


@dataclass(frozen=True)
class _Paged:
    table: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int
    key_lengths: torch.Tensor
    """[S] int32, the new tokens included."""


def _prepare_decode(cache: KVCache, positions: torch.Tensor, key_length: int) -> _Paged:
    del key_length
    rows = positions.shape[0]
    borders = torch.arange(rows + 1, dtype=torch.int32, device=positions.device)
    return _Paged(cache.table[:rows], borders, 1, (positions + 1).int())


def _prepare_extend(cache: KVCache, new: NewTokens) -> _Paged:
    last = new.position_ids.index_select(0, new.cu_seqlens[1:].long() - 1)
    return _Paged(cache.table.index_select(0, new.slots), new.cu_seqlens, max(new.lengths), (last + 1).int())


def _attend(query: torch.Tensor, cache: KVCache, layer: int, plan: _Paged) -> torch.Tensor:
    """``query`` [T, 1, heads, D], one or several tokens a sequence. One split: how keys are cut would otherwise
    depend on the batch.
    """
    out = _varlen_attn()(
        query[:, 0], cache.keys[layer], cache.values[layer], plan.cu_seqlens, None, plan.longest,
        plan.table.shape[1] * cache.page_length, window_size=_CAUSAL, enable_gqa=True, seqused_k=plan.key_lengths,
        block_table=plan.table, num_splits=1,
    )  # fmt: skip
    return out.flatten(1)[:, None]


def _problem(device: DeviceFacts) -> str | None:
    if device.type != "cuda":
        return "needs a CUDA device"
    if device.capability is not None and device.capability < (8, 0):
        return "needs a GPU of capability 8.0 or later"
    if not _is_paged():
        return "needs torch 2.13 or later"
    return None


BACKEND = Backend(
    name="varlen",
    problem=_problem,
    packed=PackedKernel(_prepare_packed, _packed, unfit=unfit_for_flash),
    cache=CacheKernel(
        layout="pages",
        page_multiple=_PAGES,
        page_length=_PAGES,
        prepare_decode=_prepare_decode,
        decode=_attend,
        prepare_extend=_prepare_extend,
        extend=_attend,
        needs_key_length=False,
        unfit=unfit_for_flash_cache,
    ),
    packed_rank=2,
    cache_rank=2,
)
