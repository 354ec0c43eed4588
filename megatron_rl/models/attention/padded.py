"""Packed tokens as padded rows, for kernels without packed input; sequences of similar length are padded together.

Padded to the longest sequence, most of the attention's work was padding: half of a rollout's samples are often a
quarter as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_rl.arithmetic import FEWEST_KEYS

BUCKET_CELLS = 8192
"""Cells (rows x keys) that must be saved to justify another kernel call. Assumes 0.04 us per cell of four heads on a
CPU, forward and backward, and 0.3 ms per call. 4,096 to 32,768 did not differ measurably.
"""
CUDA_BUCKET_CELLS = 2**20
"""The same on a GPU, where cells are cheap and a call costs some thirty launches: estimated, not measured."""
MAX_BORDERS = 32
"""Largest number of candidate borders; more cost more time than they save."""


class _Padding(torch.autograd.Function):
    """Gather tokens into cells. Outputs of padding are unused, so its gradients are 0 and are skipped."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        return packed.index_select(0, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


@dataclass(frozen=True)
class PaddedRows:
    """Index maps between packed tokens ``[T]`` and padded rows ``[B, longest]``.

    Worked example, lengths (3, 2), with fewer than `FEWEST_KEYS` keys allowed::

        gather   0 1 2 | 3 4 0      (two rows of three; the last 0 is padding)
        scatter  0 1 2   3 4
    """

    count: int
    longest: int
    gather: torch.Tensor
    """[B * longest] int64: packed index of each cell; 0 for padding."""
    scatter: torch.Tensor
    """[T] int64: cell of each packed token."""
    is_full: bool
    """True if there is no padding; then nothing is gathered or scattered."""

    @classmethod
    def build(cls, lengths: Sequence[int], cu_seqlens: torch.Tensor) -> PaddedRows:
        """Build the rows on the device of ``cu_seqlens`` [B + 1], without a host read."""
        count, longest, tokens, device = len(lengths), max(*lengths, FEWEST_KEYS), sum(lengths), cu_seqlens.device
        starts, sizes = cu_seqlens[:-1].long(), cu_seqlens.diff()
        columns = torch.arange(longest, device=device)
        gather = torch.where(columns < sizes[:, None], starts[:, None] + columns, 0).view(-1)
        padding_before = torch.arange(count, device=device) * longest - starts
        # output_size avoids a read from the device.
        shifts = padding_before.repeat_interleave(sizes, output_size=tokens)
        is_full = all(length == longest for length in lengths)
        return cls(count, longest, gather, torch.arange(tokens, device=device) + shifts, is_full)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Map ``[T, 1, H, D]`` to ``[B, H, longest, D]``."""
        cells = packed if self.is_full else _Padding.apply(packed.squeeze(1), self.gather, self.scatter)
        return cells.view(self.count, self.longest, *packed.shape[2:]).transpose(1, 2)

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[B, H, longest, D]`` to ``[T, 1, H * D]``."""
        cells = rows.transpose(1, 2).reshape(self.count * self.longest, -1)
        return (cells if self.is_full else cells.index_select(0, self.scatter))[:, None]


@dataclass(frozen=True)
class Buckets:
    """Consecutive sequences of a packed batch, padded together.

    Worked example, lengths (6, 5, 2, 2), sorted by `trainer.packing.pack`::

        one set of rows             4 rows of 6
        buckets (6, 5) and (2, 2)   2 rows of 6, 2 rows of 2
    """

    rows: tuple[PaddedRows, ...]
    tokens: tuple[int, ...]
    """Packed tokens of each bucket."""
    window: int | None = None

    @classmethod
    def build(
        cls, lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor, window: int | None = None
    ) -> Buckets:
        """See `PackedKernel.prepare`."""
        borders = cheapest_borders(lengths, CUDA_BUCKET_CELLS if position_ids.is_cuda else BUCKET_CELLS)
        parts = list(itertools.pairwise(borders))
        tokens = [sum(lengths[start:end]) for start, end in parts]
        firsts = itertools.accumulate(tokens, initial=0)
        rows = [
            PaddedRows.build(lengths[start:end], cu_seqlens[start : end + 1] - first)
            for (start, end), first in zip(parts, firsts, strict=False)
        ]
        return cls(tuple(rows), tuple(tokens), window)


def cheapest_borders(lengths: Sequence[int], bucket_cells: int) -> list[int]:
    """Return the bucket borders ``[0, .., len(lengths)]`` with the least padded work.

    Keeps the order of sequences. A bucket costs ``rows x longest^2 + bucket_cells``; exact dynamic programming over up
    to `MAX_BORDERS` positions where the length changes.
    """
    places = [i for i in range(1, len(lengths)) if lengths[i] != lengths[i - 1]]
    stride = -(-len(places) // MAX_BORDERS) or 1
    borders = [0, *places[::stride], len(lengths)]
    longest = [max(lengths[a:b]) for a, b in itertools.pairwise(borders)]
    cost, cut_before = [0.0], [0]
    for end in range(1, len(borders)):
        widest, best = FEWEST_KEYS, (float("inf"), 0)
        for start in range(end - 1, -1, -1):
            widest = max(widest, longest[start])
            work = (borders[end] - borders[start]) * widest**2 + bucket_cells
            best = min(best, (cost[start] + work, start))
        cost.append(best[0])
        cut_before.append(best[1])
    chosen, place = [], len(borders) - 1
    while place:
        chosen.append(borders[place])
        place = cut_before[place]
    return [0, *reversed(chosen)]
