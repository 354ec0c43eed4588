"""Routing, dispatch and combination of rollout tokens around the experts' products, without a host read.

Eager torch is the definition: it does what megatron's router and dispatcher do for local experts, with the same bits on
a CPU. On CUDA megatron's sums are atomic and not reproducible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import group_limited_topk, permute, unpermute
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.quantization.copies import packing_for
from megatron_rl.quantization.recipe import PackedActivations

if TYPE_CHECKING:
    from megatron_rl.models.routing import BalancedRouter

LinearInput = torch.Tensor | PackedActivations


@dataclass(frozen=True)
class Dispatched:
    """T tokens, once for each of their experts on this rank: N rows, sorted by expert and then by token."""

    rows: LinearInput
    """[N, hidden]; undefined after the last end."""
    shares: torch.Tensor
    """[N] fp32: router weight of each row."""
    ends: torch.Tensor
    """[E] int32: end of each expert's rows."""
    combine_index: torch.Tensor
    """Eager: the token of each row [N], T for unused rows. Kernels: the rows of each token [T, k]."""


class ExpertOps:
    """Routing steps for T tokens with k experts each."""

    def __init__(self, fused: bool) -> None:
        """``fused``: use Triton kernels."""
        self._fused = fused

    def route(self, tokens: torch.Tensor, router: BalancedRouter) -> tuple[torch.Tensor, torch.Tensor]:
        """Route ``tokens`` [T, hidden]: return shares fp32 and expert numbers, [T, k] each, largest first."""
        config = router.config
        is_known = config.moe_router_score_function == "softmax" and config.moe_router_topk_scaling_factor is None
        if not (self._fused and is_known):
            return _scored(router.gating(tokens), router)
        from megatron_rl.models.expert_kernels import route

        weight = router.weight.t()
        if tokens.is_cuda and tokens.dtype != torch.float32:  # without fp32 copies of both
            logits = torch.mm(tokens, weight, out_dtype=torch.float32)
        else:
            logits = torch.mm(tokens.float(), weight.float())
        return route(logits, router.bias, router.topk, config.moe_router_pre_softmax)

    def dispatch(
        self, tokens: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, experts: int, reader: torch.nn.Module
    ) -> Dispatched:
        """Sort by expert, for the product ``reader``; numbers from ``experts`` on belong to other ranks."""
        if self._fused:
            from megatron_rl.models.expert_kernels import dispatch

            return Dispatched(*dispatch(tokens, shares, chosen, experts, packing_for(reader)))
        number, order, ends = sorted_pairs(chosen, experts)
        count, top_k = chosen.shape
        rows = count * min(top_k, experts)
        number, order = number[:rows], order[:rows]
        token = order // top_k
        return Dispatched(tokens[token], shares.flatten()[order], ends, token.where(number < experts, count))

    def activate(
        self, inner: torch.Tensor, shares: torch.Tensor, config: TransformerConfig, reader: torch.nn.Module
    ) -> LinearInput:
        """Return the activation of ``inner`` [N, 2 F] or [N, F], each row times its share: [N, F] for ``reader``."""
        if self._fused and has_plain_swiglu(config):
            from megatron_rl.models.kernels import gate_up

            return gate_up(inner, packing_for(reader), shares)
        return activated(inner, shares, config)

    def combine(self, output: torch.Tensor, dispatched: Dispatched, tokens: int) -> torch.Tensor:
        """Sum the experts' ``output`` [N, hidden] per token in expert order: [T, hidden]."""
        if self._fused:
            from megatron_rl.models.expert_kernels import combine

            return combine(output, dispatched.combine_index)
        return unpermute(output, dispatched.combine_index, (tokens + 1, output.shape[1]))[:tokens]


def _scored(logits: torch.Tensor, router: BalancedRouter) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by ``logits`` [T, experts] like megatron: shares and numbers of the experts, [T, k] each."""
    config, top_k = router.config, router.topk
    if config.moe_router_score_function == "softmax":
        scores = logits.softmax(-1) if config.moe_router_pre_softmax else logits
        shares, chosen = scores.topk(top_k, 1)
        shares = shares if config.moe_router_pre_softmax else shares.softmax(-1)
    else:
        scores = logits.float().sigmoid()
        ranked = scores if router.expert_bias is None else scores + router.expert_bias
        if config.moe_router_group_topk:
            sizes = *logits.shape, config.moe_router_num_groups, config.moe_router_group_topk
            _, chosen = group_limited_topk(ranked, top_k, *sizes)
        else:
            chosen = ranked.topk(top_k, 1).indices
        shares = scores.gather(1, chosen)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) if top_k > 1 else shares
    factor = config.moe_router_topk_scaling_factor
    return shares * factor if factor else shares, chosen


def sorted_pairs(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the (token, expert) pairs of ``chosen`` [T, k] by expert and then by token.

    Returns the expert of each pair and its original number, [T k] each, and the end of each of the first ``experts``,
    [E] int32.
    """
    number, order = chosen.flatten().sort(stable=True)
    each = torch.arange(experts, dtype=number.dtype, device=number.device)
    return number, order, torch.searchsorted(number, each, right=True, out_int32=True)


@contextlib.contextmanager
def ordered_dispatch() -> Iterator[None]:
    """Make megatron's dispatcher sum in expert order without atomics, also in gradients, inside the context."""
    token_dispatcher.permute, token_dispatcher.unpermute = _permute_in_order, _unpermute_in_order
    try:
        yield
    finally:
        token_dispatcher.permute, token_dispatcher.unpermute = permute, unpermute


def _permute_in_order(tokens: torch.Tensor, *args: Any, **named: Any) -> tuple[Any, ...]:
    _, *rest = permute(tokens[:, :0], *args, **named)  # its order, without its copy
    return PermutedRows.apply(tokens, rest[1], None), *rest


def _unpermute_in_order(rows: torch.Tensor, token: torch.Tensor, restore_shape: torch.Size, **_: Any) -> torch.Tensor:
    return PermutedRows.apply(rows, token, restore_shape[0])


class PermutedRows(torch.autograd.Function):
    """Gather rows of [T, hidden] by ``token`` [N], or sum N rows by token; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, token: torch.Tensor, tokens: int | None) -> torch.Tensor:
        ctx.save_for_backward(token)
        ctx.tokens = len(values) if tokens is None else None
        return _permute_rows(values, token, tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _permute_rows(grad, *ctx.saved_tensors, ctx.tokens), None, None


def _permute_rows(values: torch.Tensor, token: torch.Tensor, tokens: int | None) -> torch.Tensor:
    if tokens is None:
        return values.index_select(0, token)
    if not values.is_cuda:
        return unpermute(values, token, (tokens, values.shape[1]))
    from megatron_rl.models.expert_kernels import combine

    return combine(values.contiguous(), token.argsort(stable=True).view(tokens, -1))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid approximation of GELU; megatron's own would be compiled by torch."""
    return x * torch.sigmoid(1.702 * x)


def has_plain_swiglu(config: TransformerConfig) -> bool:
    """Return whether the activation is ``silu(gate) * up``, without clamp or offset, and not a fused kernel."""
    others = config.use_te_activation_func or config.bias_activation_fusion
    is_plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0
    return config.gated_linear_unit and config.activation_func is functional.silu and is_plain and not others


def activated(inner: torch.Tensor, shares: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return the activation of ``inner`` [N, 2 F], gates first, or [N, F], times fp32 ``shares`` [N]: [N, F].

    With clamp c and offset o: ``activation(min(gate, c)) * (clamp(up, -c, c) + o)``.
    """
    activation, bound = config.activation_func, config.activation_func_clamp_value
    if config.gated_linear_unit:
        gate, up = inner.chunk(2, -1)
        if bound is not None:
            gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
        scaled = activation(gate) * (up + config.glu_linear_offset if config.glu_linear_offset else up)
    else:
        scaled = activation(inner)
    return (scaled * shares[:, None]).to(inner.dtype)
