"""Packed tokens as padded rows, for kernels that know rows only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.attention.product import FEWEST_KEYS


@dataclass(frozen=True)
class PaddedRows:
    """Index maps between packed tokens ``[T]`` and padded rows ``[B, longest]``.

    Worked example, lengths (3, 2), with fewer than `FEWEST_KEYS` keys allowed::

        gather   0 1 2 | 3 4 0      (two rows of three; the 0 is padding)
        scatter  0 1 2   3 4
    """

    count: int
    longest: int
    gather: torch.Tensor
    """[B * longest] int64: packed index of each cell; 0 where the cell is padding."""
    scatter: torch.Tensor
    """[T] int64: cell of each packed token."""

    @classmethod
    def build(cls, lengths: Sequence[int], cu_seqlens: torch.Tensor, offsets: torch.Tensor) -> PaddedRows:
        """``offsets`` [T] int64 count the tokens of each sequence from 0.

        Built on the device of ``cu_seqlens``; reads nothing back to the host.
        """
        count, longest = len(lengths), max(*lengths, FEWEST_KEYS)
        starts = cu_seqlens[:-1].long()
        columns = torch.arange(longest, device=starts.device)
        inside = columns[None] < (cu_seqlens[1:].long() - starts)[:, None]
        gather = torch.where(inside, starts[:, None] + columns, 0).view(-1)
        row_of_token = torch.repeat_interleave(
            torch.arange(count, device=starts.device),
            cu_seqlens[1:].long() - starts,
            output_size=offsets.numel(),  # given, so that the size is not read from the device
        )
        return cls(count, longest, gather, row_of_token * longest + offsets)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """``[T, 1, H, D]`` -> ``[B, H, longest, D]``."""
        cells = packed[:, 0].index_select(0, self.gather)
        return cells.view(self.count, self.longest, *packed.shape[2:]).transpose(1, 2)

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, H, longest, D]`` -> ``[T, 1, H * D]``."""
        cells = rows.transpose(1, 2).reshape(self.count * self.longest, -1)
        return cells.index_select(0, self.scatter)[:, None]
