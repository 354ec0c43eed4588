"""What a layer's attention needs to know about the batch, computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.attention.backend import PackedKernel
from megatron_rl.attention.backends import sdpa
from megatron_rl.attention.rope import RopeTable, rotate


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
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    kernel: PackedKernel | None = None
    prepared: Any = None
    """What the kernel computed once for all layers."""

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        cu_seqlens: torch.Tensor,
        position_ids: torch.Tensor,
        rope: RopeTable,
        dtype: torch.dtype,
        kernel: PackedKernel = sdpa.BACKEND.packed,
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
            kernel=kernel,
            prepared=kernel.prepare(lengths, cu_seqlens, position_ids),
        )

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """See `AttentionPlan`."""
        return rotate(heads, self.cos, self.sin)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionPlan`; differentiable."""
        return self.kernel.attend(query, key, value, self.prepared)
