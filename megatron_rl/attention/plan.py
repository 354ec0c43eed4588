"""What a layer's attention needs to know about the batch, computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.attention.rope import RopeTable, rotate
from megatron_rl.attention.sdpa import PaddedRows, packed_attention


class AttentionPlan(Protocol):
    """Rotates and attends for one forward pass. Tensors are ``[T, 1, heads, D]``."""

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Apply rotary embedding at the batch's positions."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention within each sequence -> ``[T, 1, query_heads * D]``.

        ``layer`` is megatron's 1-based global layer number.
        """
        ...


@dataclass
class PackedPlan(PackedSeqParams):
    """Causal self-attention over sequences laid end to end.

    A ``PackedSeqParams``, so megatron passes it through `GPTModel` to every layer untouched.
    Worked example, lengths (3, 2)::

        rows.gather   0 1 2 | 3 4 0      (two rows of three; the 0 is padding)
        rows.scatter  0 1 2   3 4
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rows: PaddedRows | None = None

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        cu_seqlens: torch.Tensor,
        position_ids: torch.Tensor,
        rope: RopeTable,
        dtype: torch.dtype,
    ) -> PackedPlan:
        """``cu_seqlens`` [B+1] int32 and ``position_ids`` [T] int64 lie on the compute device."""
        longest = max(lengths)
        cos, sin = rope.at(position_ids, dtype)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cos=cos,
            sin=sin,
            rows=PaddedRows.build(lengths, cu_seqlens, position_ids),
        )

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """See `AttentionPlan`."""
        return rotate(heads, self.cos, self.sin)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionPlan`; differentiable."""
        return packed_attention(query, key, value, self.rows)
