"""A decoder layer that takes the short way in rollouts: its submodules and nothing around them.

Stock, a layer is wrapped for recomputation, dropout, offloading and cross-attention, all of them off in a
rollout; at 64 rows and a hidden size of 64 the wrapping took as long as the products. Here the same operations
run on the same numbers, so that on a CPU the result is the training forward's to the bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.attention import AttentionPlan, PlannedSelfAttention
from megatron_rl.models.rollout_ops import LinearInput, Pending, RolloutOps, add, is_rms


class RolloutPlan(AttentionPlan, Protocol):
    """What layers ask of a rollout's context."""

    ops: RolloutOps

    @property
    def stores_heads(self) -> bool:
        """Whether `attend_mixed` is there for this forward pass."""
        ...

    def attend_mixed(
        self, layer: int, mixed: torch.Tensor, query_norm: torch.nn.Module | None, key_norm: torch.nn.Module | None
    ) -> torch.Tensor:
        """Norms, rotation, cache and attention of ``mixed`` [T, groups, share + 2, D] -> ``[T, 1, heads * D]``.

        A group's queries, its key and its value lie side by side.
        """
        ...


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
        self._head_norms = (attention.q_layernorm, attention.k_layernorm) if self.config.qk_layernorm else (None, None)
        self.has_storable_heads = self.config.num_query_groups >= attention.world_size and (
            not self.config.qk_layernorm or all(map(is_rms, self._head_norms))
        )
        """Whether a kernel knows everything between the projection and the cache."""
        self._groups = attention.num_query_groups_per_partition
        self._head_width = attention.hidden_size_per_attention_head

    def forward(
        self, hidden_states: torch.Tensor, *stock: Any, inference_context: Any = None, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See megatron's layer; the short way where a rollout asks for it."""
        short = self.has_short_way and not self.training and not torch.is_grad_enabled()
        if short and hasattr(inference_context, "attend"):
            return add(*self.decode(hidden_states.squeeze(1), None, inference_context))[:, None], None
        return super().forward(hidden_states, *stock, inference_context=inference_context, **others)

    def decode(
        self, hidden: torch.Tensor, pending: Pending | None, plan: RolloutPlan
    ) -> tuple[torch.Tensor, Pending]:
        """The residual stream ``[T, hidden]`` and what is still to be added to it, before and after the layer.

        For evaluation without gradients only. Adding is left to the norm that follows, so that a kernel can do both.
        """
        attention, ops = self.self_attention, plan.ops
        hidden, normed = ops.add_norm(hidden, pending, self.input_layernorm, attention.linear_qkv)
        attended = self._attended(normed, plan).view(hidden.shape[0], -1)
        pending = Pending(*call_linear(attention.linear_proj, attended))
        if self.has_plain_mlp:
            hidden, normed = ops.add_norm(hidden, pending, self.pre_mlp_layernorm, self.mlp.linear_fc1)
            return hidden, Pending(*self._plain_mlp(normed, ops))
        hidden, normed = ops.add_norm(hidden, pending, self.pre_mlp_layernorm, None)
        output, bias = self.mlp(normed[:, None])
        return hidden, Pending(output.view(hidden.shape), bias)

    def _attended(self, normed: LinearInput, plan: RolloutPlan) -> torch.Tensor:
        """The normed ``[T, hidden]`` -> ``[T, 1, heads * D]``."""
        attention = self.self_attention
        if plan.stores_heads and self.has_storable_heads:
            mixed, _ = call_linear(attention.linear_qkv, normed)
            heads = mixed.view(mixed.shape[0], self._groups, -1, self._head_width)
            return plan.attend_mixed(self.layer_number, heads, *self._head_norms)
        return plan.attend(self.layer_number, *self._heads(normed, plan))

    def _heads(
        self, normed: LinearInput, plan: AttentionPlan
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

    def _plain_mlp(self, normed: LinearInput, ops: RolloutOps) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, hidden]`` -> ``[T, hidden]`` and the bias that is left to the caller."""
        inner, bias = call_linear(self.mlp.linear_fc1, normed)
        if bias is not None:
            inner.add_(bias)
        return call_linear(self.mlp.linear_fc2, ops.activate(inner, self.config, self.mlp.linear_fc2))


def call_linear(module: torch.nn.Module, tokens: LinearInput) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``module(tokens)`` without the dispatch to hooks where none is registered.

    ``forward`` is looked up on the instance: quantised rollouts put theirs there.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return module(tokens)
    return module.forward(tokens)
