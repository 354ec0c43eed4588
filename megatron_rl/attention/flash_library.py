"""Flash kernels that others ship, over packed batches and over a cache in pages of 256 tokens.

What `backends.flash` and `backends.varlen` share: their plans, and what such kernels do not take. An adapter calls
its library in two places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.attention.backend import (
    Backend,
    CacheKernel,
    DeviceFacts,
    KVCache,
    NewTokens,
    Numbers,
    PackedKernel,
    SpanKernel,
)

_PAGES = 256
"""They take pages of a multiple of it."""


@dataclass(frozen=True)
class Borders:
    """Of sequences laid end to end."""

    cu_seqlens: torch.Tensor
    """[S + 1] int32."""
    longest: int

    window: int | None = field(default=None, kw_only=True)

    @property
    def causal_window(self) -> tuple[int, int]:
        """As such kernels take it: keys before the token, and behind it; -1: all."""
        return (-1 if self.window is None else self.window - 1, 0)


@dataclass(frozen=True)
class Spans(Borders):
    """Each has the end of its keys in sight; the kernels align the causal mask there, at the lower right."""

    key_cu_seqlens: torch.Tensor
    """[S + 1] int32."""
    key_longest: int


@dataclass(frozen=True)
class Paged(Borders):
    """New tokens of S sequences, and where each one's pages lie."""

    table: torch.Tensor
    """[S, pages] int32."""
    key_lengths: torch.Tensor
    """[S] int32, the new tokens included."""
    key_length: int
    """No sequence is longer."""


def flash_backend(
    name: str,
    absent: Callable[[], str | None],
    packed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Spans], torch.Tensor],
    paged: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Paged], torch.Tensor],
    ranks: tuple[int, int],
) -> Backend:
    """A backend of one library.

    ``absent`` says why it is not there. The others take and give [T, heads, D]; ``packed`` with keys and values [K,
    groups, D], ``paged`` with [pages, block_size, groups, D].
    """

    def problem(device: DeviceFacts) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        if device.capability is not None and device.capability < (8, 0):
            return "needs a GPU of capability 8.0 or later"
        return absent()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Spans) -> torch.Tensor:
        return packed(query[:, 0], key[:, 0], value[:, 0], plan).flatten(1)[:, None]

    def attend_cached(query: torch.Tensor, cache: KVCache, layer: int, plan: Paged) -> torch.Tensor:
        return paged(query[:, 0], cache.keys[layer], cache.values[layer], plan).flatten(1)[:, None]

    cache = CacheKernel(
        "blocks", _prepare_decode, attend_cached, _prepare_extend, attend_cached, block_multiple=_PAGES,
        block_size=_PAGES, needs_key_length=False, unfit=_unfit_for_cache, windows=True,
    )  # fmt: skip
    kernel = PackedKernel(_whole_sequences, attend, _unfit, SpanKernel(_spans, attend), windows=True)
    return Backend(name, problem, kernel, cache, *ranks)


def borders_of(lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor) -> Borders:
    """See `PackedKernel.prepare`."""
    return Borders(cu_seqlens, max(lengths))


def _whole_sequences(
    lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor, window: int | None = None
) -> Spans:
    return Spans(cu_seqlens, max(lengths), cu_seqlens, max(lengths), window=window)


def _spans(share: ContextShare, window: int | None = None) -> Spans:
    queries, keys = max(share.query_lengths), max(share.key_lengths)
    return Spans(share.query_borders, queries, share.key_borders, keys, window=window)


def _prepare_decode(
    cache: KVCache, positions: torch.Tensor, key_length: int, window: int | None = None
) -> Paged:
    rows = positions.shape[0]
    borders = torch.arange(rows + 1, dtype=torch.int32, device=positions.device)
    return Paged(borders, 1, cache.table[:rows], (positions + 1).int(), cache.max_length, window=window)


def _prepare_extend(cache: KVCache, new: NewTokens, window: int | None = None) -> Paged:
    last = new.position_ids.index_select(0, new.cu_seqlens[1:].long() - 1)
    table = cache.table.index_select(0, new.rows)
    return Paged(new.cu_seqlens, max(new.lengths), table, (last + 1).int(), new.key_length, window=window)


def half_precision_only(device: DeviceFacts, numbers: Numbers) -> str | None:
    """See `PackedKernel.unfit`."""
    if numbers.dtype in (torch.bfloat16, torch.float16):
        return None
    return "computes in 16 bits only (--bf16)"


def _unfit(device: DeviceFacts, numbers: Numbers) -> str | None:
    if numbers.width > 256 or numbers.width % 8:
        return f"takes heads of up to 256 numbers in multiples of 8, not of {numbers.width}"
    return half_precision_only(device, numbers)


def _unfit_for_cache(device: DeviceFacts, numbers: Numbers) -> str | None:
    if numbers.stored != numbers.dtype:
        return "reads a KV cache in the model's own numbers only (--rl-kv-cache-dtype auto)"
    return _unfit(device, numbers)
