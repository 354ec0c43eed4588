"""What a layer's attention needs to know about the batch, computed once and used by every layer.

Stock, megatron recomputes cos and sin in every layer and, for packed batches, splits the tensor by sequence on the
host. Here a plan gathers the rows once.
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

Turns = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Name of a rotation -> cos and sin, [N, 1, 1, R] each, of N tokens."""


def prepared_for(window: int | None, prepare: Callable[..., Any], *batch: Any) -> Any:
    """Return what a kernel computes once for all layers of one window; None for those without one."""
    return prepare(*batch) if window is None else prepare(*batch, window)


def given(sinks: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the last argument of what attends, [heads], in layers that have attention sinks; others have none."""
    return () if sinks is None else (sinks,)


def prepared_steps(
    kernel: CacheKernel, window: int | None, cache: KVCache, positions: torch.Tensor, key_length: int
) -> Iterator[Any]:
    """Yield what ``decode`` is given in each of k steps at ``positions`` [k, N]; the first are below ``key_length``."""
    if kernel.prepare_steps is not None and window is None:
        yield from kernel.prepare_steps(cache, positions, key_length)
        return
    for step, at in enumerate(positions):
        yield prepared_for(window, kernel.prepare_decode, cache, at, min(key_length + step, cache.max_length))


class RopeTable:
    """cos and sin of every position up to ``max_length`` for one rotation of a model, fp32, [max_length, R].

    ``R`` is the rotated part of a head (`--rotary-percent`). The sign of rotate-half is folded
    into the first half of ``sin``, which saves a negation per layer.
    """

    def __init__(self, embedding: RotaryEmbedding, max_length: int, amplitude: float = 1.0) -> None:
        """``amplitude`` multiplies cos and sin: that of YaRN."""
        if embedding.rotary_interleaved:
            raise ValueError("interleaved rotary embeddings are not supported; use the default layout")
        angles = embedding.get_emb(max_length)[:, 0, 0, :]
        self.cos = angles.cos()
        self.sin = angles.sin()
        if amplitude != 1.0:
            self.cos, self.sin = self.cos * amplitude, self.sin * amplitude
        self.sin[:, : self.sin.shape[-1] // 2] *= -1

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin for ``positions`` [N] int64, each [N, 1, 1, R] in ``dtype``."""
        cos = self.cos.index_select(0, positions)[:, None, None].to(dtype)
        sin = self.sin.index_select(0, positions)[:, None, None].to(dtype)
        return cos, sin


Ropes = Mapping[str, RopeTable]
"""The rotations of a model, by name."""


def turns_at(ropes: Ropes, positions: torch.Tensor, dtype: torch.dtype) -> Turns:
    """Compute the turns of every rotation, for ``positions`` [N] int64."""
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

        ``layer`` is megatron's 1-based global layer number; ``sinks`` [query heads] of a kind that has them.
        """
        ...


@dataclass
class PackedPlan(PackedSeqParams):
    """Causal self-attention over sequences laid end to end.

    A ``PackedSeqParams``, so megatron passes it through `GPTModel` to every layer untouched.
    """

    turns: Turns | None = None
    kernel: PackedKernel | None = None
    prepared: Mapping[int | None, Any] | None = None
    """Window, or None -> what the kernel computed once for all layers that have it."""
    routing: Mapping[int, torch.Tensor] | None = None
    """Of each layer, numbered as in `attend`, the experts [T, k] to send the tokens to; None: the router chooses."""
    balance: Any = None
    """What routers hear of losses of their own, in passes with gradients."""
    lengths: tuple[int, ...] = ()
    """Of the sequences, in the order in which they lie."""
    places: torch.Tensor | None = None
    """[T] int64, 0 to T - 1, from the first layer whose kernel rotates and stores heads."""
    recurrent: Any = None
    """What the first layer with a recurrent state computes of ``lengths`` for all of them."""

    @classmethod
    def build(
        cls, lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor, ropes: Ropes,
        dtype: torch.dtype, kernel: PackedKernel, windows: Iterable[int | None] = (None,), **further: Any,
    ) -> PackedPlan:  # fmt: skip
        """Build the plan; ``cu_seqlens`` [B+1] int32 and ``position_ids`` [T] int64 lie on the compute device.

        ``windows`` are those of the layers, None for those without.
        """
        packed, longest = (lengths, cu_seqlens, position_ids), max(lengths)
        return cls(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest,
            max_seqlen_kv=longest, lengths=tuple(lengths), turns=turns_at(ropes, position_ids, dtype), kernel=kernel,
            **further or {"prepared": {window: prepared_for(window, kernel.prepare, *packed) for window in windows}},
        )  # fmt: skip

    def rotate(self, heads: torch.Tensor, kind: LayerKind = PLAIN) -> torch.Tensor:
        """See `AttentionPlan`."""
        return rotate(heads, *self.turns[kind.rotation])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: LayerKind = PLAIN,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionPlan`; differentiable."""
        return self.attended(query, key, value, self.prepared[kind.window], *given(sinks))

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *prepared: Any) -> torch.Tensor:
        """Run the kernel, whose last arguments are what it ``prepared``, and the sinks of layers that have them."""
        return self.kernel.attend(query, key, value, *prepared)
