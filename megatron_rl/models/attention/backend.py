"""What an attention backend is: which passes it computes, over which cache, and on which devices.

    packed   sequences laid end to end, nothing cached: training, and prompts that fit one prefill
    decode   one new token a row against the KV cache
    extend   several new tokens of several sequences, their beginnings already in the KV cache
    spans    as packed, of a share of the tokens: pieces of sequences against the keys up to their ends

A kernel first prepares a batch, once for all layers: a function that is given the sliding window as one more argument,
but only where the layers have one (`plan.prepared`). Of layers with attention sinks what attends is given them as one
more argument, [query heads], the logit of each head that takes part in its softmax and attends to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from megatron_rl.models.attention.kv_format import KVFormat
from megatron_rl.registry import Registry


@dataclass(frozen=True)
class DeviceFacts:
    """The device on which a backend would run."""

    type: str
    """``cpu`` or ``cuda``."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU."""


@dataclass(frozen=True)
class Requirements:
    """A run's requirements of its kernels, as far as they differ in it."""

    dtype: torch.dtype
    """Of the model's activations."""
    cache_dtype: torch.dtype
    """Of the KV cache."""
    head_width: int
    spans: bool = False
    """Training runs a share of a packed batch: over context-parallel ranks, or as sequences share beginnings."""
    window: int | None = None
    """Of the layers that attend to the most recent tokens only; None: there are none."""
    sinks: bool = False
    """Layers have attention sinks."""
    latents: bool = False
    """Values have another width than keys, and in a cache of latents are a part of them."""
    invariant: bool = False
    """A token gets the same bits in a rollout and in training (`--batch-invariant-mode`); on a CPU all backends do."""


class KVCache(Protocol):
    """The cache as a backend sees it; ``keys`` and ``values`` have one tensor a layer.

    Rows: ``[rows, groups, max_length, D]``. Blocks: ``[blocks, block_size, groups, D]`` and ``table``
    [rows, blocks of the longest sequence] int32.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    dtype: torch.dtype
    """Of the model's activations: what a product with the cache is computed in."""
    max_length: int
    """Of a sequence."""
    format: KVFormat
    """What ``keys`` and ``values`` hold; where it is not exact, a kernel reads through it or knows its scales."""
    table: torch.Tensor
    """Blocks only."""
    block_size: int
    """Blocks only; tokens."""


@dataclass(frozen=True)
class NewTokens:
    """Several tokens of several sequences, laid end to end."""

    rows: torch.Tensor
    """[S] int64, of the cache."""
    lengths: Sequence[int]
    """New tokens of each sequence, known to the host."""
    cu_seqlens: torch.Tensor
    """[S + 1] int32, their borders."""
    position_ids: torch.Tensor
    """[T] int64 within the whole sequence."""
    key_length: int
    """No sequence is longer than this after them."""


def anywhere(device: DeviceFacts, requirements: Requirements | None = None) -> None:
    """Report no problem: for what runs on every device, whatever is asked of it."""


@dataclass(frozen=True)
class SpanKernel:
    """Attention of spans, each to its sequence's keys up to its own end; differentiable."""

    prepare: Callable[..., Any]
    """(`Share`) -> what ``attend`` is given."""
    attend: Callable[..., torch.Tensor]
    """(query [W, 1, heads, D], key and value [K, 1, groups, D], prepared) -> [W, 1, heads * D]: K are the keys of each
    span end to end, of which a span's last token sees all, the one before it all but the last."""


@dataclass(frozen=True)
class PackedKernel:
    """Causal self-attention within each sequence of a packed batch; differentiable."""

    prepare: Callable[..., Any]
    """(lengths, cu_seqlens [B + 1] int32, position_ids [T] int64) -> what ``attend`` is given."""
    attend: Callable[..., torch.Tensor]
    """(query [T, 1, heads, D], key and value [T, 1, groups, D], prepared) -> [T, 1, heads * D]."""
    unfit: Callable[[DeviceFacts, Requirements], str | None] = anywhere
    """Why it cannot do what is required, in words that follow its name; None if it can."""
    spans: SpanKernel | None = None
    """None: it computes whole sequences only."""
    windows: bool = False
    """It computes sliding windows; ``spans``, too."""
    sinks: bool = False
    """It computes attention sinks; ``spans``, too."""
    latents: bool = False
    """It takes values of another width than keys."""


@dataclass(frozen=True)
class CacheKernel:
    """Attention over the KV cache. New keys and values are in the cache before it is asked."""

    layout: Literal["rows", "blocks"]
    """``rows``: a row is a stretch of memory of its own. ``blocks``: a table says where its pieces, pages, lie."""
    prepare_decode: Callable[..., Any]
    """(cache, positions [N] of the new tokens in rows 0..N-1, key_length above all of them) -> what ``decode`` is
    given."""
    decode: Callable[..., torch.Tensor]
    """(query [N, 1, heads, D], cache, index of the layer, prepared) -> [N, 1, heads * D]."""
    prepare_extend: Callable[..., Any]
    """(cache, `NewTokens`) -> what ``extend`` is given."""
    extend: Callable[..., torch.Tensor]
    """As ``decode``, with query [T, 1, heads, D]."""
    needs_key_length: bool = True
    """False where ``key_length`` is not used, so that one captured graph serves all lengths."""
    prepare_steps: Callable[[KVCache, torch.Tensor, int], Iterator[Any]] | None = None
    """`prepare_decode` for positions [k, N] of k steps, each one further than the last, where that is cheaper. A
    step's result is used up before the next one is asked for."""
    block_multiple: int = 1
    """The block size must be a multiple of it."""
    unfit: Callable[[DeviceFacts, Requirements], str | None] = anywhere
    """As of `PackedKernel`."""
    windows: bool = False
    sinks: bool = False
    latents: bool = False

    @property
    def block_size(self) -> int:
        """Tokens a block unless asked otherwise."""
        return max(64, self.block_multiple)


@dataclass(frozen=True)
class Backend:
    """One file of ``backends/``."""

    name: str
    problem: Callable[[DeviceFacts], str | None]
    """Why it cannot run there, in a few words that follow its name; None if it can."""
    packed: PackedKernel | None
    cache: CacheKernel | None
    packed_rank: int = 0
    """The automatic choice takes the highest rank of those that can run; 0 is never taken automatically."""
    cache_rank: int = 0


BACKENDS: Registry[Backend] = Registry("attention backend", "megatron_rl.models.attention.backends", "BACKEND")
