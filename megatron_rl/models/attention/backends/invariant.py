"""Batch-invariant attention: the same bits in rollouts and training (`--batch-invariant-mode`).

Decode, extend and packed batches sum in the same order (`models/attention/extend.py`). Gradients are those of torch's
flash kernel, from our output and log-sum-exp. Never chosen automatically.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.context import Share
from megatron_rl.models.attention.backend import Backend, DeviceFacts, PackedKernel, SpanKernel
from megatron_rl.models.attention.backends import triton_paged, varlen

_KNOWN = {"logsumexp", "cum_seq_q", "cum_seq_k", "rng_state", "unused", "window_size_left", "window_size_right"}
"""Arguments of torch's flash backward pass that this file passes; they differ between torch versions."""
_Batch = tuple[torch.Tensor, torch.Tensor, int, int, int | None]
"""Offsets [S + 1] int32 of queries (the last tokens of each sequence) and of keys; the longest of each; the window."""


def _whole_sequences(lengths: Sequence[int], cu_seqlens: torch.Tensor, _: Any, window: int | None = None) -> _Batch:
    return cu_seqlens, cu_seqlens, max(lengths), max(lengths), window


def _spans(share: Share, window: int | None = None) -> _Batch:
    return share.query_borders, share.key_borders, max(share.query_lengths), max(share.key_lengths), window


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: _Batch, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return _Attention.apply(query, key, value, sinks, batch)


class _Attention(torch.autograd.Function):
    """Our forward kernel, and the backward pass of torch's flash kernel."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        from megatron_rl.models.attention.extend import extend

        (query, key, value), sinks, ctx.batch = (each.contiguous() for each in args[:3]), *args[3:]
        queries, keys, longest, _, window = ctx.batch
        first = (keys.diff() - queries.diff()).long()
        lse = query.new_empty(query.shape[2], query.shape[0], dtype=torch.float32)
        out = extend(query, key, value, keys, queries, first, longest, (), sinks, window, True, lse)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, sinks, out, lse = ctx.saved_tensors
        *batch, window = ctx.batch
        heads = [each.squeeze(1) for each in inputs]
        grad, out, unused = grad.view_as(heads[0]), out.view_as(heads[0]), out.new_empty(0)
        gradients = torch.ops.aten._flash_attention_backward(
            grad, *heads, out, lse, *batch, 0.0, window is None, unused, unused, scale=None,
            window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )  # fmt: skip
        lost = None
        if sinks is not None:  # the share of a sink, whose value is 0, times what all shares bring
            brought = (grad.float() * out.float()).sum(-1)
            lost = -(torch.exp(sinks.float() - lse.t()) * brought).sum(0).to(sinks.dtype)
        return *(each[:, None] for each in gradients), lost, None


def _problem(device: DeviceFacts) -> str | None:
    arguments = torch.ops.aten._flash_attention_backward.default._schema.arguments
    if not {argument.name for argument in arguments} >= _KNOWN:
        return f"cannot call the flash backward pass of torch {torch.__version__}; use torch 2.11 to 2.13"
    return (varlen if device.type == "cuda" else triton_paged).BACKEND.problem(device)


_PAGED = triton_paged.BACKEND.cache
BACKEND = Backend(
    "invariant", _problem,
    PackedKernel(
        _whole_sequences, _attend, varlen.unsupported, SpanKernel(_spans, _attend), windows=True, sinks=True
    ),
    # Pages are a multiple of the key block in packed batches.
    replace(
        _PAGED, prepare_decode=functools.partial(_PAGED.prepare_decode, invariant=True), block_multiple=64,
        prepare_extend=functools.partial(_PAGED.prepare_extend, invariant=True), unsupported=varlen.cache_unsupported,
    ),
)  # fmt: skip
