"""The `sdpa` backend: torch's scaled_dot_product_attention, on every device.

A packed batch is laid out as padded rows for the product and packed again after it, so the mask
is causal per sequence and never T x T over the whole batch.

On a CPU the trainer (up to `EXPLICIT_LENGTH`) and the rollout engine share `_attend`, in a form whose
results do not depend on how many rows are computed together: their log-probs then agree to the bit
in fp32, instead of to 2e-5 for the least likely tokens of a sharp model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

EXPLICIT_LENGTH = 256
"""Longest row for which the CPU spells the product out; beyond it the flash kernel wins time and memory."""

FEWEST_ROWS = 4
"""Matrix products with fewer rows take another CPU kernel, which adds up in another order."""

FEWEST_KEYS = 16
"""The same for the keys of a softmax and of its products; masked keys fill the row up."""


@dataclass(frozen=True)
class PaddedRows:
    """Index maps between packed tokens ``[T]`` and padded rows ``[B, longest]``."""

    count: int
    longest: int
    gather: torch.Tensor
    """[B * longest] int64: packed index of each cell; 0 where the cell is padding."""
    scatter: torch.Tensor
    """[T] int64: cell of each packed token."""

    @classmethod
    def build(
        cls, lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor
    ) -> PaddedRows:
        """Built on the device of ``cu_seqlens``; reads nothing back to the host."""
        count, longest = len(lengths), max(*lengths, FEWEST_KEYS)
        starts = cu_seqlens[:-1].long()
        columns = torch.arange(longest, device=starts.device)
        inside = columns[None] < (cu_seqlens[1:].long() - starts)[:, None]
        gather = torch.where(inside, starts[:, None] + columns, 0).view(-1)
        row_of_token = torch.repeat_interleave(
            torch.arange(count, device=starts.device),
            cu_seqlens[1:].long() - starts,
            output_size=position_ids.numel(),  # given, so that the size is not read from the device
        )
        return cls(count, longest, gather, row_of_token * longest + position_ids)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """``[T, 1, H, D]`` -> ``[B, H, longest, D]``."""
        cells = packed[:, 0].index_select(0, self.gather)
        return cells.view(self.count, self.longest, *packed.shape[2:]).transpose(1, 2)

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, H, longest, D]`` -> ``[T, 1, H * D]``."""
        cells = rows.transpose(1, 2).reshape(self.count * self.longest, -1)
        return cells.index_select(0, self.scatter)[:, None]


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PaddedRows
) -> torch.Tensor:
    """Causal attention within each sequence: ``[T, 1, heads, D]`` -> ``[T, 1, heads * D]``.

    A padding cell is a copy of token 0 behind the sequence's end: causality keeps it from every
    real token, and its own output is never gathered.
    """
    padded = rows.pad(query), rows.pad(key), rows.pad(value)
    if query.device.type == "cpu" and rows.longest <= EXPLICIT_LENGTH:
        return rows.unpad(_explicit_causal(*padded))
    output = functional.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True)
    return rows.unpad(output)


def cached_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """One new token per row against its cache -> ``[N, 1, query_heads * D]``.

    ``query`` [N, 1, query_heads, D]; caches [N, groups, K, D]; ``mask`` [N, 1, 1, K] additive
    (0 or -inf). Query heads of a group are folded into the query length, so the cache is read
    once per group and never expanded. Not differentiable.
    """
    rows, _, heads, width = query.shape
    groups, keys = key_cache.shape[1:3]
    share = heads // groups
    # The idle rows that keep the arithmetic are zeros; the scale is multiplied in as the others are written.
    folded = query.new_zeros(rows, groups, max(share, FEWEST_ROWS if query.device.type == "cpu" else 1), width)
    torch.mul(query.reshape(rows, groups, share, width), width**-0.5, out=folded[:, :, :share])
    # `_attend`, spelt with bmm: of its views and expansions nothing is needed here.
    scores = torch.bmm(folded.flatten(0, 1), key_cache.flatten(0, 1).transpose(1, 2))
    scores.view(rows, groups, -1, keys).add_(mask)
    weights = scores.float().softmax(-1).to(value_cache.dtype)
    output = torch.bmm(weights, value_cache.flatten(0, 1)).view(rows, groups, -1, width)
    return output[:, :, :share].reshape(rows, 1, heads * width)


def _explicit_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``[B, heads, L, D]`` against ``[B, groups, L, D]``, differentiable."""
    count, heads, length, width = query.shape
    share = heads // key.shape[1]
    mask = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    folded = query.reshape(count, key.shape[1], share * length, width)
    return _attend(folded, key, value, mask.repeat(share, 1)).view(count, heads, length, width)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``softmax(query key^T / sqrt(D) + mask) value`` with the softmax in fp32."""
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2)).add_(mask)
    weights = scores.float().softmax(-1).to(value.dtype)
    return torch.matmul(weights, value)
