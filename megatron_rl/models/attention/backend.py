"""The interface of attention backends: kernels, their inputs, and the devices they support.

    packed   concatenated sequences, nothing cached: training, and prompts that fit one prefill
    decode   one new token per row against the KV cache
    extend   several new tokens of several sequences whose prefixes are in the KV cache
    spans    like packed, for a share of the tokens: pieces of sequences against the keys up to their ends

``prepare`` runs once per batch, for all layers; in models with sliding windows once per window, which is its last
argument (`plan.prepared_for`). ``attend`` gets the attention sinks of layers that have them as last argument, [query
heads]: a logit per head that enters the softmax with a zero value.
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
    """What a model and run require of attention kernels."""

    dtype: torch.dtype
    """Dtype of activations."""
    cache_dtype: torch.dtype
    """Dtype of the KV cache."""
    head_width: int
    spans: bool = False
    """Training computes a share of each batch: with context parallelism or shared prompts."""
    window: int | None = None
    """Sliding window of the layers that have one; None: no such layers."""
    sinks: bool = False
    """Layers have attention sinks."""
    latents: bool = False
    """Values are narrower than keys (MLA); in a latent cache they are a part of the keys."""
    invariant: bool = False
    """A token gets the same bits in rollouts and training (`--batch-invariant-mode`); on a CPU all backends comply."""


class KVCache(Protocol):
    """The cache as a backend sees it; ``keys`` and ``values`` have one tensor per layer.

    Rows: ``[rows, groups, max_length, D]``. Blocks: ``[blocks, block_size, groups, D]`` and ``table`` [rows, blocks of
    the longest sequence] int32.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    dtype: torch.dtype
    """Dtype of activations, in which attention is computed."""
    max_length: int
    """Longest sequence."""
    format: KVFormat
    """Number format of ``keys`` and ``values``; kernels for E4M3 need its scales."""
    table: torch.Tensor
    """Blocks only."""
    block_size: int
    """Blocks only; tokens per block."""


@dataclass(frozen=True)
class NewTokens:
    """New tokens of several sequences, concatenated."""

    rows: torch.Tensor
    """[S] int64, rows of the cache."""
    lengths: Sequence[int]
    """New tokens of each sequence, on the host."""
    cu_seqlens: torch.Tensor
    """[S + 1] int32, offsets of the sequences."""
    position_ids: torch.Tensor
    """[T] int64, positions within the whole sequences."""
    key_length: int
    """Upper bound of the sequence lengths including these tokens."""


def no_problem(device: DeviceFacts, requirements: Requirements | None = None) -> None:
    """Return None: no requirements."""


@dataclass(frozen=True)
class SpanKernel:
    """Attention of spans, each to its sequence's keys up to its own end; differentiable."""

    prepare: Callable[..., Any]
    """(`Share`) -> ``prepared``."""
    attend: Callable[..., torch.Tensor]
    """(query [W, 1, heads, D], key and value [K, 1, groups, D], prepared) -> [W, 1, heads * D]. K: the keys of all
    spans, concatenated; the last token of a span sees all of its keys, the one before it all but the last.
    """


@dataclass(frozen=True)
class PackedKernel:
    """Causal self-attention within each sequence of a packed batch; differentiable."""

    prepare: Callable[..., Any]
    """(lengths, cu_seqlens [B + 1] int32, position_ids [T] int64) -> ``prepared``."""
    attend: Callable[..., torch.Tensor]
    """(query [T, 1, heads, D], key and value [T, 1, groups, D], prepared) -> [T, 1, heads * D]."""
    unsupported: Callable[[DeviceFacts, Requirements], str | None] = no_problem
    """Return what the kernel does not support, as a phrase after its name; else None."""
    spans: SpanKernel | None = None
    """None: only whole sequences."""
    windows: bool = False
    """Supports sliding windows, also in ``spans``."""
    sinks: bool = False
    """Supports attention sinks, also in ``spans``."""
    latents: bool = False
    """Supports values of another width than keys."""


@dataclass(frozen=True)
class CacheKernel:
    """Attention over the KV cache, to which new keys and values have already been written."""

    layout: Literal["rows", "blocks"]
    """``rows``: each row is contiguous. ``blocks``: a table lists the blocks (pages) of each row."""
    prepare_decode: Callable[..., Any]
    """(cache, positions [N] of the new tokens in rows 0..N-1, key_length above all of them) -> ``prepared``."""
    decode: Callable[..., torch.Tensor]
    """(query [N, 1, heads, D], cache, layer index, prepared) -> [N, 1, heads * D]."""
    prepare_extend: Callable[..., Any]
    """(cache, `NewTokens`) -> ``prepared``."""
    extend: Callable[..., torch.Tensor]
    """Like ``decode``, with query [T, 1, heads, D]."""
    needs_key_length: bool = True
    """False if ``key_length`` is ignored, so that one captured graph serves all lengths."""
    prepare_steps: Callable[[KVCache, torch.Tensor, int], Iterator[Any]] | None = None
    """A cheaper `prepare_decode` for k steps at positions [k, N], each one further than the last. A yielded value is
    invalid after the next one.
    """
    block_multiple: int = 1
    """The block size must be a multiple of it."""
    unsupported: Callable[[DeviceFacts, Requirements], str | None] = no_problem
    """See `PackedKernel.unsupported`."""
    windows: bool = False
    sinks: bool = False
    latents: bool = False

    @property
    def block_size(self) -> int:
        """Default tokens per block."""
        return max(64, self.block_multiple)


@dataclass(frozen=True)
class Backend:
    """The ``BACKEND`` of a file in ``backends/``."""

    name: str
    problem: Callable[[DeviceFacts], str | None]
    """Return why it cannot run on a device, as a short phrase after its name; else None."""
    packed: PackedKernel | None
    cache: CacheKernel | None
    packed_rank: int = 0
    """The supported backend with the highest rank is chosen automatically; 0: never."""
    cache_rank: int = 0


BACKENDS: Registry[Backend] = Registry("attention backend", "megatron_rl.models.attention.backends", "BACKEND")
