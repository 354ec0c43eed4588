"""Attention with grouped keys and values (MHA, GQA, MQA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.families import LayerKind
from megatron_rl.models.attention.plan import PackedPlan
from megatron_rl.models.attention.self_attention import PlannedSelfAttention
from megatron_rl.models.blocks import Block, cut_by_heads, weight_of
from megatron_rl.models.rollout_ops import (
    LinearInput,
    NormAcrossHeads,
    Pending,
    TorchNorm,
    WholeColumnLinear,
    WholeRowLinear,
    call_linear,
    call_without_bias,
    is_rms,
)

if TYPE_CHECKING:
    from megatron_rl.models.rollout import RolloutPlan


class Sinks(MegatronModule):
    """Parameter container for attention sinks, named as in megatron's attention; never called."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the tensors for ``dist_checkpointing``: tensor-parallel ranks have a share of the heads each."""
        return cut_by_heads(self.state_dict(keep_vars=True), prefix, sharded_offsets)


class HeadAttention(Block, PlannedSelfAttention):
    """megatron's attention with rotation, mask, sinks and scale of the layer's kind."""

    expects = {"attention_output_gate": False, "qk_l2_norm": False}
    reader = "linear_qkv"

    @staticmethod
    def stock(config: TransformerConfig) -> dict[str, Any]:
        # megatron skips a gradient all-reduce when only one of spec and config says so.
        return {"qk_layernorm": config.qk_layernorm}

    @staticmethod
    def replace_modules(submodules: SelfAttentionSubmodules, config: TransformerConfig) -> None:
        if config.qk_layernorm:
            submodules.q_layernorm = submodules.k_layernorm = TorchNorm
        if config.softmax_type == "learnable":
            submodules.core_attention = Sinks
        elif config.context_parallel_size > 1:  # megatron's own, which nothing calls, cannot even be built
            submodules.core_attention = IdentityOp
        if config.tensor_model_parallel_size == 1:
            submodules.linear_qkv, submodules.linear_proj = WholeColumnLinear, WholeRowLinear

    def prepare(self, kind: LayerKind) -> None:
        has_norms = self.config.qk_layernorm
        self.kind = kind
        if kind.norm_across_heads:
            heads, groups, width = self.config.num_attention_heads, self.config.num_query_groups, self.key_hidden_size
            self.q_layernorm = NormAcrossHeads(self.config, heads * width, self.pg_collection.tp)
            self.k_layernorm = NormAcrossHeads(self.config, groups * width, self.pg_collection.tp)
        self._norms = (self.q_layernorm, self.k_layernorm) if has_norms else (None, None)
        # With fewer groups than ranks megatron exchanges parts of groups between ranks.
        has_own_groups = self.config.num_query_groups >= self.world_size
        if not has_own_groups:
            self.reader = None
        is_plain = has_own_groups and kind.scale is None
        self._rotates_together = is_plain and not has_norms
        # The fused kernel covers everything between the projection and the cache.
        self._is_storable = is_plain and (not has_norms or all(map(is_rms, self._norms)))

    def rotated(self, hidden_states: torch.Tensor, plan: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cos_sin = plan.cos_sin[self.kind.rotation] if isinstance(plan, PackedPlan) else None
        is_whole = cos_sin is not None and cos_sin[0].shape[-1] == self.hidden_size_per_attention_head
        if not (hidden_states.is_cuda and self._is_storable and is_whole):
            return super().rotated(hidden_states, plan)
        if plan.places is None:
            plan.places = torch.arange(len(hidden_states), device=hidden_states.device)
        return self._rotated_whole(self._mixed(hidden_states).output, cos_sin, plan.places)

    def _rotated_whole(
        self, mixed: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate the output of `_mixed` like a decode step, bit for bit; ``places`` are 0 to T - 1."""
        from megatron_rl.models.training_kernels import RotatedHeads

        weights = (norm and weight_of(norm) for norm in self._norms)
        return RotatedHeads.apply(mixed, cos_sin, places, self._norms, *weights)

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        if plan.stores_heads and self._is_storable:
            mixed, bias = self._mixed(normed, call_without_bias)
            attended = plan.attend_mixed(self.layer_number, mixed, bias, *self._norms, self.kind, self.sinks)
        else:
            attended = plan.attend(self.layer_number, *self._heads(normed, plan), self.kind, self.sinks)
        return Pending(*call_linear(self.linear_proj, attended.view(attended.shape[0], -1)))

    def _mixed(self, normed: LinearInput, call: Callable[..., Pending] = call_linear) -> Pending:
        """``[T, hidden]`` -> ``[T, groups, share + 2, D]``: queries, key and value of each group; and a bias to add."""
        mixed, bias = call(self.linear_qkv, normed)
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        return Pending(mixed.view(mixed.shape[0], groups, -1, width), bias)

    def _heads(self, normed: LinearInput, plan: RolloutPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[T, hidden]`` -> rotated query and key, and value, ``[T, 1, heads, D]`` each."""
        if self.reader is None:  # megatron's own way, which takes no activations packed for a quantised product
            return self.rotated(normed[:, None], plan)
        mixed, _ = self._mixed(normed)
        if plan.ops.fused and self._is_storable and (tables := plan.cos_sin(self.kind))[0].shape[-1] == mixed.shape[-1]:
            return self._rotated_whole(mixed, tables, torch.arange(len(mixed), device=mixed.device))
        both, value = mixed[:, :, :-1], mixed[:, :, -1].unsqueeze(1)
        if self._rotates_together:
            both = plan.rotate(both, self.kind)
        query, key = both[:, :, :-1].reshape(len(mixed), 1, -1, mixed.shape[-1]), both[:, :, -1].unsqueeze(1)
        if self._rotates_together:
            return query, key, value
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return plan.rotate(self.scaled(query), self.kind), plan.rotate(key, self.kind), value


BLOCK = HeadAttention
