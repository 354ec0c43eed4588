"""Per-batch inputs of attention, computed once and used by every layer.

Without a plan megatron recomputes cos and sin in every layer and splits packed batches by sequence on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.families import PLAIN, LayerKind
from megatron_rl.models.attention.backend import CacheKernel, KVCache, PackedKernel
from megatron_rl.models.gradients import rotate

CosSin = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Rotation name -> cos and sin, [N, 1, 1, R] each, at the positions of N tokens."""


def prepared_for(window: int | None, prepare: Callable[..., Any], *batch: Any) -> Any:
    """Call ``prepare`` for the layers of one window (None: without a window)."""
    return prepare(*batch) if window is None else prepare(*batch, window)


def sink_args(sinks: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return ``sinks`` [heads] as optional last argument of an ``attend`` function."""
    return () if sinks is None else (sinks,)


def prepared_steps(
    kernel: CacheKernel, window: int | None, cache: KVCache, positions: torch.Tensor, key_length: int
) -> Iterator[Any]:
    """Yield ``prepared`` for each of k decode steps at ``positions`` [k, N]; the first are below ``key_length``."""
    if kernel.prepare_steps is not None and window is None:
        yield from kernel.prepare_steps(cache, positions, key_length)
        return
    for step, at in enumerate(positions):
        yield prepared_for(window, kernel.prepare_decode, cache, at, min(key_length + step, cache.max_length))


class RopeTable:
    """cos and sin of every position up to ``max_length`` for one rotation, fp32, [max_length, R].

    ``R`` is the rotated part of a head (`--rotary-percent`). The sign of rotate-half is folded into the first half of
    ``sin``, which saves a negation per layer.
    """

    def __init__(self, embedding: RotaryEmbedding, max_length: int, amplitude: float = 1.0) -> None:
        """``amplitude`` multiplies cos and sin (YaRN)."""
        if embedding.rotary_interleaved:
            raise ValueError("interleaved rotary embeddings are not supported; use the default layout")
        angles = embedding.get_emb(max_length)[:, 0, 0, :]
        self.cos = angles.cos()
        self.sin = angles.sin()
        if amplitude != 1.0:
            self.cos, self.sin = self.cos * amplitude, self.sin * amplitude
        self.sin[:, : self.sin.shape[-1] // 2] *= -1

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin at ``positions`` [N] int64, each [N, 1, 1, R] in ``dtype``."""
        cos = self.cos.index_select(0, positions)[:, None, None].to(dtype)
        sin = self.sin.index_select(0, positions)[:, None, None].to(dtype)
        return cos, sin


Ropes = Mapping[str, RopeTable]
"""The rotations of a model, by name."""


def rope_at(ropes: Ropes, positions: torch.Tensor, dtype: torch.dtype) -> CosSin:
    """Return cos and sin of every rotation at ``positions`` [N] int64."""
    return {name: rope.at(positions, dtype) for name, rope in ropes.items()}


class AttentionPlan(Protocol):
    """Rotates and attends for one forward pass. Tensors are ``[T, 1, heads, D]``."""

    def rotate(self, heads: torch.Tensor, kind: LayerKind = PLAIN) -> torch.Tensor:
        """Apply rotary embedding at the batch's positions."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: LayerKind = PLAIN,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend causally within each sequence -> ``[T, 1, query_heads * D]``.

        ``layer`` is megatron's 1-based global layer number; ``sinks`` [query heads] or None.
        """
        ...


@dataclass
class PackedPlan(PackedSeqParams):
    """Causal self-attention over concatenated sequences, passed on by megatron as ``PackedSeqParams``."""

    cos_sin: CosSin | None = None
    kernel: PackedKernel | None = None
    prepared: Mapping[int | None, Any] | None = None
    """Window (or None) -> the kernel's ``prepared`` for all layers that have it."""
    routing: Mapping[int, torch.Tensor] | None = None
    """Layer number -> experts [T, k] to use (router replay); None: the router chooses."""
    balance: Any = None
    """`BalanceLosses` of the routers, in passes with gradients."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths, in order."""
    places: torch.Tensor | None = None
    """[T] int64, 0 to T - 1; set by the first layer that uses a fused rotation kernel."""
    recurrent: Any = None
    """`Chunks` of the sequences; set by the first layer with a recurrent state."""

    @classmethod
    def build(
        cls, lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor, ropes: Ropes,
        dtype: torch.dtype, kernel: PackedKernel, windows: Iterable[int | None] = (None,), **further: Any,
    ) -> PackedPlan:  # fmt: skip
        """Build the plan; ``cu_seqlens`` [B+1] int32 and ``position_ids`` [T] int64 are on the compute device.

        ``windows``: those of the layers, None for layers without one.
        """
        packed, longest = (lengths, cu_seqlens, position_ids), max(lengths)
        return cls(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest,
            max_seqlen_kv=longest, lengths=tuple(lengths), kernel=kernel, cos_sin=rope_at(ropes, position_ids, dtype),
            **further or {"prepared": {window: prepared_for(window, kernel.prepare, *packed) for window in windows}},
        )  # fmt: skip

    def rotate(self, heads: torch.Tensor, kind: LayerKind = PLAIN) -> torch.Tensor:
        return rotate(heads, *self.cos_sin[kind.rotation])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: LayerKind = PLAIN,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionPlan`; differentiable."""
        return self.run_kernel(query, key, value, self.prepared[kind.window], *sink_args(sinks))

    def run_kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *prepared: Any) -> torch.Tensor:
        """Run the kernel; the last arguments are its ``prepared`` and, in layers that have them, the sinks."""
        return self.kernel.attend(query, key, value, *prepared)
