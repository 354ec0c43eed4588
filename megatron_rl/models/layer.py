"""A decoder layer that takes the short way in rollouts: its submodules and nothing around them.

Stock, a layer is wrapped for recomputation, dropout, offloading and cross-attention, all of them off in a
rollout; at 64 rows and a hidden size of 64 the wrapping took as long as the products. Here the same operations
run on the same numbers, so that on a CPU the result is the training forward's to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.attention import AttentionPlan, PlannedSelfAttention


class RolloutLayer(TransformerLayer):
    """megatron's layer; `decode` is its evaluation-mode forward with an `AttentionPlan`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.has_short_way = (
            isinstance(self.self_attention, PlannedSelfAttention)
            and isinstance(self.cross_attention, IdentityOp)
            and not self.config.attention_output_gate
            and not self.config.fp32_residual_connection
            and not self.config.inference_fuse_tp_communication
        )
        """Whether `decode` knows everything this layer does."""
        self.has_plain_mlp = (
            type(self.mlp) is MLP
            and not self.config.use_te_activation_func
            and not self.config.bias_activation_fusion
            and self.config.activation_func_clamp_value is None
            and not self.config.glu_linear_offset
        )
        attention = self.self_attention
        # Left to megatron: norms of query and key, and fewer groups than ranks, which then exchange their parts.
        self.has_plain_heads = (
            not self.config.qk_layernorm and self.config.num_query_groups >= attention.world_size
        )
        self._groups = attention.num_query_groups_per_partition
        self._head_width = attention.hidden_size_per_attention_head

    def forward(
        self, hidden_states: torch.Tensor, *stock: Any, inference_context: Any = None, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See megatron's layer; the short way where a rollout asks for it."""
        short = self.has_short_way and not self.training and not torch.is_grad_enabled()
        if short and hasattr(inference_context, "attend"):
            return self.decode(hidden_states.squeeze(1), inference_context)[:, None], None
        return super().forward(hidden_states, *stock, inference_context=inference_context, **others)

    def decode(self, hidden: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``; for evaluation without gradients only."""
        attended = plan.attend(self.layer_number, *self._heads(self.input_layernorm.forward(hidden), plan))
        output, bias = call_linear(self.self_attention.linear_proj, attended.view(hidden.shape[0], -1))
        hidden = _add(output, bias, hidden)
        normed = self.pre_mlp_layernorm.forward(hidden)
        output, bias = self._plain_mlp(normed) if self.has_plain_mlp else self.mlp(normed[:, None])
        return _add(output.view(hidden.shape), bias, hidden)

    def _heads(
        self, normed: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[T, hidden]`` -> rotated query and key, and value, ``[T, 1, heads, D]`` each."""
        attention = self.self_attention
        if not self.has_plain_heads:
            query, key, value = attention.get_query_key_value_tensors(normed[:, None])
            return plan.rotate(query), plan.rotate(key), value
        mixed, _ = call_linear(attention.linear_qkv, normed)
        # A group's queries, its key and its value lie side by side: the first two are rotated in one go.
        parts = mixed.view(mixed.shape[0], self._groups, -1, self._head_width)
        turned = plan.rotate(parts[:, :, :-1])
        query = turned[:, :, :-1].reshape(mixed.shape[0], 1, -1, self._head_width)
        return query, turned[:, :, -1].unsqueeze(1), parts[:, :, -1].unsqueeze(1)

    def _plain_mlp(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, hidden]`` -> ``[T, hidden]`` and the bias that is left to the caller."""
        inner, bias = call_linear(self.mlp.linear_fc1, normed)
        if bias is not None:
            inner.add_(bias)
        if self.config.gated_linear_unit:
            gate, up = inner.chunk(2, -1)
            inner = self.config.activation_func(gate).mul_(up)
        else:
            inner = self.mlp.activation_func(inner)
        return call_linear(self.mlp.linear_fc2, inner)


def call_linear(module: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``module(tokens)`` without the dispatch to hooks where none is registered.

    ``forward`` is looked up on the instance: quantised rollouts put theirs there.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return module(tokens)
    return module.forward(tokens)


def _add(output: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """``output + bias + residual`` in megatron's order, in the memory of ``output``."""
    if bias is not None:
        output.add_(bias)
    return output.add_(residual)
