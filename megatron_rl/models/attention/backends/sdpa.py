"""torch's scaled_dot_product_attention, on every device, with a cache of rows.

A packed batch is padded to rows, grouped by similar length, and packed again afterwards, so the causal mask is per
sequence, not T x T.

On a CPU attention is written out in matrix products, in trainer and rollout engine alike: results do not depend on the
number of rows, so in fp32 both give identical log-probs, where torch's kernels differ by up to 2e-5
(docs/decisions/001).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional

from megatron_rl.algorithms.context import Share
from megatron_rl.arithmetic import FEWEST_ROWS
from megatron_rl.models.attention.backend import (
    Backend,
    CacheKernel,
    KVCache,
    NewTokens,
    PackedKernel,
    SpanKernel,
    no_problem,
)
from megatron_rl.models.attention.padded import BUCKET_CELLS, CUDA_BUCKET_CELLS, Buckets, PaddedRows, cheapest_borders

EXPLICIT_LENGTH = 256
"""Longest row for the written-out attention on a CPU; for longer ones the flash kernel is faster and smaller."""
SINK_WIDTH = 8
"""Extra head width for attention sinks in torch's kernels."""
QUERIES_AT_ONCE = 512
"""Queries of a long span per call: limits the mask's rows and skips keys behind the last query. Not tuned."""


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buckets: Buckets, *sinks: torch.Tensor
) -> torch.Tensor:
    """See `PackedKernel.attend`."""
    if len(buckets.rows) == 1:
        return padded_attention(query, key, value, buckets.rows[0], buckets.window, *sinks)
    # split and cat: the gradient of a slice would be a zeroed copy of the whole for every bucket.
    parts = (packed.split(buckets.tokens) for packed in (query, key, value))
    outputs = [padded_attention(*part, buckets.window, *sinks) for part in zip(*parts, buckets.rows, strict=True)]
    return torch.cat(outputs)


def padded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PaddedRows, window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend in one bucket: ``[T, 1, heads, D]`` -> ``[T, 1, heads * D]``; ``sinks`` [heads].

    Padding cells copy token 0 to the end of a row: the causal mask hides them from real tokens, and their own outputs
    are dropped.
    """
    padded = rows.pad(query), rows.pad(key), rows.pad(value)
    if query.device.type == "cpu" and rows.longest <= EXPLICIT_LENGTH:
        return rows.unpad(attend_heads(*padded, causal_mask(rows.longest, query.dtype, window), sinks))
    if window is not None and window < rows.longest:
        return rows.unpad(_windowed_attention(*padded, window, sinks))
    if sinks is None:
        return rows.unpad(functional.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True))
    query, key, value = _with_sink_key(*padded, sinks)
    query = functional.pad(query, (0, 0, 1, 0))  # a token for the sink's key, so that all see what is before them
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=1.0)
    return rows.unpad(output[:, :, 1:, :-SINK_WIDTH])


def causal_mask(length: int, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
    """Return an additive mask [length, length]: -inf for keys behind the token or outside of its window, else 0."""
    hidden = torch.full((length, length), float("-inf"), dtype=dtype)
    return hidden.triu(1) if window is None else hidden.triu(1) + hidden.tril(-window)


def _windowed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend ``[B, heads, L, D]``, some queries at a time against the keys in their windows."""
    parts, end = [], 0
    for part in query.split(QUERIES_AT_ONCE, dim=2):
        start, end = end, end + part.shape[2]
        first = max(0, start - window + 1)
        positions = torch.arange(start - first, end - first, device=query.device)
        mask = hide_keys(positions, end - first, query.dtype, window)
        parts.append(_masked(part, key[:, :, first:end], value[:, :, first:end], mask, sinks))
    return torch.cat(parts, 2)


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    if sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    query, key, value = _with_sink_key(query, key, value, sinks)
    mask = functional.pad(mask, (1, 0))  # every token sees the sink
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, scale=1.0)
    return output[..., :-SINK_WIDTH]


def _with_sink_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn ``sinks`` [heads] into a first key with value 0, which torch's kernels support; scores become unscaled.

    Queries and keys get an extra dimension: the head's sink in queries, 1 in the sink's key, 0 in other keys. CUDA
    kernels need widths in multiples of eight, so seven zeros are added too.
    """
    rows, heads, length, width = query.shape
    own = functional.pad(sinks.to(query.dtype)[:, None], (0, SINK_WIDTH - 1))
    query = torch.cat((query * width**-0.5, own[None, :, None].expand(rows, heads, length, SINK_WIDTH)), -1)
    key, value = (functional.pad(each, (0, SINK_WIDTH, 1, 0)) for each in (key, value))
    first = torch.zeros_like(key[0, 0])
    first[0, width] = 1
    return query, key + first, value


def attend_one_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend with one new token per row -> ``[N, 1, query_heads * E]``.

    ``query`` [N, 1, query_heads, D]; ``key`` [N, groups, K, D], ``value`` the same with E; ``mask`` [N, 1, 1, K]
    additive; ``sinks`` [query_heads]. The query heads of a group become rows of one product, so the cache is read
    once per group and not expanded. Not differentiable.
    """
    rows, _, heads, width = query.shape
    groups, keys = key.shape[1:3]
    share = heads // groups
    # Zero rows pad the product to a size with the same rounding; the scale is applied while the others are written.
    folded = query.new_zeros(rows, groups, max(share, FEWEST_ROWS if query.device.type == "cpu" else 1), width)
    torch.mul(query.reshape(rows, groups, share, width), width**-0.5, out=folded[:, :, :share])
    # Like `attend_heads`, with bmm: its views and expansions are not needed here.
    scores = torch.bmm(folded.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    each = scores.view(rows, groups, -1, keys).add_(mask)
    if sinks is None:
        weights = scores.float().softmax(-1).to(value.dtype)
    else:
        own = functional.pad(sinks.view(groups, share, 1), (0, 0, 0, folded.shape[2] - share))
        weights = _softmax(each, own, value.dtype).flatten(0, 1)
    output = torch.bmm(weights, value.flatten(0, 1)).view(rows, groups, -1, value.shape[-1])
    return output[:, :, :share].reshape(rows, 1, -1)


def attend_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``softmax(query key^T / sqrt(D) + mask) value`` in fp32, differentiable: several tokens per row.

    ``query`` [B, heads, L, D], ``key`` [B, groups, K, D], ``value`` [B, groups, K, E], ``mask`` [L, K] or [B, 1, L, K]
    additive, ``sinks`` [heads] -> ``[B, heads, L, E]``.
    """
    count, heads, length, width = query.shape
    groups = key.shape[1]
    share = heads // groups
    folded = query.reshape(count, groups, share * length, width)
    repeated = mask.repeat(*(1 for _ in mask.shape[:-2]), share, 1)
    scores = torch.matmul(folded * width**-0.5, key.transpose(-1, -2)).add_(repeated)
    if sinks is None:
        weights = scores.float().softmax(-1).to(value.dtype)
    else:
        own = sinks.view(groups, share, 1, 1).expand(-1, -1, length, -1)
        weights = _softmax(scores, own.reshape(groups, share * length, 1), value.dtype)
    return torch.matmul(weights, value).view(count, heads, length, -1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Softmax of ``scores`` [B, groups, R, K] with ``sinks`` [groups, R, 1], whose weights are dropped.

    Sinks come first: behind the keys, the number of masked keys would change the summation order and the last bits.
    """
    own = sinks.float().expand(len(scores), *sinks.shape)
    return torch.cat((own, scores.float()), -1).softmax(-1)[..., 1:].to(dtype)


def hide_keys(positions: torch.Tensor, keys: int, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
    """Return an additive mask [N, keys]: -inf for keys behind ``positions`` [N] or outside of the window."""
    columns = torch.arange(keys, device=positions.device)
    mask = torch.zeros(positions.shape[0], keys, dtype=dtype, device=positions.device)
    mask.masked_fill_(columns > positions[:, None], float("-inf"))
    if window is not None:
        # Idle rows may be beyond all keys. With every key masked they would write NaN to the cache, which masks keep.
        mask.masked_fill_(columns <= positions.clamp_max(keys - 1)[:, None] - window, float("-inf"))
    return mask


@dataclass(frozen=True)
class CachePlan:
    """One new token per row, or several with ``rows``."""

    where: Any
    """Row count (decode), row indices (extend), or pages [N, pages]."""
    mask: torch.Tensor
    """[N, 1, 1 or longest, keys], 0 or -inf."""
    rows: PaddedRows | None = None

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with ``query`` [T, 1, heads, D] to the cached keys and values, [N, groups, keys, D]."""
        if self.rows is None:
            return attend_one_token(query, keys, values, self.mask, sinks)
        return self.rows.unpad(attend_heads(self.rows.pad(query), keys, values, self.mask, sinks))


def plan_decode(
    where: Any, positions: torch.Tensor, keys: int, dtype: torch.dtype, window: int | None = None
) -> CachePlan:
    """Plan one new token per row at ``positions`` [N]: it sees the keys up to its own, or the last ``window``."""
    return CachePlan(where, hide_keys(positions, keys, dtype, window)[:, None, None])


def plan_extend(where: Any, new: NewTokens, keys: int, dtype: torch.dtype, window: int | None = None) -> CachePlan:
    """Plan several new tokens per sequence, like `plan_decode`."""
    rows = PaddedRows.build(new.lengths, new.cu_seqlens)
    mask = hide_keys(new.position_ids.index_select(0, rows.gather), keys, dtype, window)
    return CachePlan(where, mask.view(rows.count, 1, rows.longest, keys), rows)


@dataclass(frozen=True)
class _Spans:
    """Consecutive spans that are computed together."""

    queries: int
    """Tokens."""
    keys: int
    padded: CachePlan | None = None
    """For short spans; None: a single long one."""
    key_rows: PaddedRows | None = None
    mask: torch.Tensor | None = None
    """For a long span: fp32, 0 or -inf, for the last queries and keys of any span."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend: ``query`` [queries, 1, heads, D], keys and values [keys, 1, groups, D] -> [queries, 1, heads * D]."""
        if self.padded is not None:
            return self.padded.attend(query, self.key_rows.pad(key), self.key_rows.pad(value), sinks)
        query, key, value = (packed.permute(1, 2, 0, 3) for packed in (query, key, value))
        parts, seen = [], self.keys - self.queries
        for part in query.split(self.mask.shape[0], dim=2):
            seen += part.shape[2]
            mask = self.mask[-part.shape[2] :, -seen:].to(query.dtype)
            parts.append(_masked(part, key[:, :, :seen], value[:, :, :seen], mask, sinks))
        return torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(2)


def prepare_spans(share: Share, window: int | None = None) -> list[_Spans]:
    """Group the spans: each long one alone, short ones of similar length padded together."""
    device, spans = share.keys.device, list(zip(share.query_lengths, share.key_lengths, strict=True))
    longest = max(share.key_lengths)
    height = min(QUERIES_AT_ONCE, max(share.query_lengths))
    corner = hide_keys(torch.arange(longest - height, longest, device=device), longest, torch.float32, window)
    found, cells = [], CUDA_BUCKET_CELLS if share.keys.is_cuda else BUCKET_CELLS
    for are_short, run in itertools.groupby(spans, lambda span: span[1] <= EXPLICIT_LENGTH):
        queries, keys = zip(*run, strict=True)
        if are_short:
            borders = cheapest_borders(keys, cells)
            parts = itertools.pairwise(borders)
            found += [_short_spans(queries[first:end], keys[first:end], device, window) for first, end in parts]
        else:
            found += [_Spans(*sizes, mask=corner) for sizes in zip(queries, keys, strict=True)]
    return found


def _short_spans(queries: Sequence[int], keys: Sequence[int], device: torch.device, window: int | None) -> _Spans:
    offsets = ([0, *itertools.accumulate(lengths)] for lengths in (queries, keys))
    borders = (torch.tensor(each, dtype=torch.int32, device=device) for each in offsets)
    rows, key_rows = map(PaddedRows.build, (queries, keys), borders)
    seen_by_first = torch.tensor([key - query for query, key in zip(queries, keys, strict=True)], device=device)
    positions = seen_by_first[:, None] + torch.arange(rows.longest, device=device)
    mask = hide_keys(positions.view(-1), key_rows.longest, torch.float32, window)
    mask = mask.view(rows.count, 1, rows.longest, key_rows.longest)
    return _Spans(sum(queries), sum(keys), CachePlan(None, mask, rows), key_rows)


def attend_spans(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: list[_Spans], *sinks: torch.Tensor
) -> torch.Tensor:
    """See `SpanKernel.attend`."""
    queries = query.split([part.queries for part in spans])
    keys, values = (packed.split([part.keys for part in spans]) for packed in (key, value))
    return torch.cat([part.attend(*own, *sinks) for part, *own in zip(spans, queries, keys, values, strict=True)])


def _prepare_decode(cache: KVCache, positions: torch.Tensor, key_length: int, window: int | None = None) -> CachePlan:
    return plan_decode(positions.shape[0], positions, key_length, cache.dtype, window)


def _prepare_extend(cache: KVCache, new: NewTokens, window: int | None = None) -> CachePlan:
    return plan_extend(new.rows, new, new.key_length, cache.dtype, window)


def _prepare_steps(cache: KVCache, positions: torch.Tensor, key_length: int) -> Iterator[CachePlan]:
    """Yield plans from one mask, in which each step reveals one more key; idle rows may be beyond all keys."""
    steps, longest = positions.shape[0], cache.max_length
    last_length = min(key_length + steps - 1, longest)
    whole = plan_decode(positions.shape[1], positions[0], last_length, cache.dtype)
    for step, at in enumerate(positions):
        if step:
            whole.mask.scatter_(-1, at.clamp_max(last_length - 1)[:, None, None, None], 0.0)
        yield CachePlan(whole.where, whole.mask[..., : min(key_length + step, longest)])


def _attend(query: torch.Tensor, cache: KVCache, layer: int, plan: CachePlan, *sinks: torch.Tensor) -> torch.Tensor:
    """Attend to views of the first rows, or to copies of selected rows."""
    length = plan.mask.shape[-1]
    keys, values = cache.keys[layer].narrow(2, 0, length), cache.values[layer].narrow(2, 0, length)
    if plan.rows is None:
        keys, values = keys.narrow(0, 0, plan.where), values.narrow(0, 0, plan.where)
    else:
        keys, values = keys.index_select(0, plan.where), values.index_select(0, plan.where)
    return plan.attend(query, *cache.format.unpack(layer, keys, values), *sinks)


BACKEND = Backend(
    name="sdpa",
    problem=no_problem,
    packed=PackedKernel(
        Buckets.build, packed_attention, spans=SpanKernel(prepare_spans, attend_spans),
        windows=True, sinks=True, latents=True,
    ),
    cache=CacheKernel(
        "rows", _prepare_decode, _attend, _prepare_extend, _attend, prepare_steps=_prepare_steps,
        windows=True, sinks=True, latents=True,
    ),
    packed_rank=1,
    cache_rank=1,
)
