"""Attention whose output is multiplied element-wise by a sigmoid gate, projected from the layer's input."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region

from megatron_rl.models.blocks.heads import HeadAttention
from megatron_rl.models.rollout_ops import LinearInput, Pending, call_linear

if TYPE_CHECKING:
    from megatron_rl.models.attention.plan import AttentionPlan
    from megatron_rl.models.rollout import RolloutPlan


class GatedAttention(HeadAttention):
    """`HeadAttention` whose query projection interleaves each head with its gate."""

    expects = {"attention_output_gate": True, "qk_l2_norm": False}

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over ``hidden_states`` [T, 1, hidden] of a `PackedPlan`."""
        *heads, gate = self._opened(hidden_states, packed_seq_params)
        attend = functools.partial(packed_seq_params.attend, self.layer_number, kind=self.kind)
        if self.training and self.checkpoint_core_attention:
            attend = functools.partial(tensor_parallel.checkpoint, attend, False)
        return self.linear_proj(attend(*heads) * gate)

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        *heads, gate = self._opened(normed, plan)
        attended = plan.attend(self.layer_number, *heads, self.kind) * gate
        return Pending(*call_linear(self.linear_proj, attended[:, 0]))

    def _opened(self, hidden: LinearInput, plan: AttentionPlan) -> tuple[torch.Tensor, ...]:
        """``[T, .., hidden]`` -> rotated query and key, and value, [T, 1, heads, D], and the gate [T, 1, heads * D]."""
        mixed = self._in_groups(hidden)
        both, key, value = mixed.split((mixed.shape[3] - 2, 1, 1), 3)
        query, gate = both.unflatten(3, (-1, 2)).flatten(2, 3).unbind(3)
        key = key[..., 0, :]
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = plan.rotate(self.scaled(query), self.kind), plan.rotate(key, self.kind)
        return query, key, value[..., 0, :], gate.flatten(2).sigmoid()

    def _in_groups(self, hidden: LinearInput) -> torch.Tensor:
        """``[T, .., hidden]`` -> [T, 1, groups, 2 share + 2, D]: this rank's queries with gates, key and value."""
        if self.reader is not None:
            return self._mixed(hidden)[0].unsqueeze(1)
        # With fewer groups than ranks, a rank stores part of a group and gathers the whole one of its heads.
        ranks, groups = self.pg_collection.tp, self.config.num_query_groups
        of_group = ranks.size() // groups
        mixed, _ = call_linear(self.linear_qkv, hidden)
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=ranks)
        group = mixed.view(mixed.shape[0], 1, groups, -1, self.hidden_size_per_attention_head)
        group = group[:, :, ranks.rank() // of_group].unsqueeze(2)
        both, key_and_value = group.split((group.shape[3] - 2, 2), 3)
        return torch.cat((both.chunk(of_group, 3)[ranks.rank() % of_group], key_and_value), 3)


BLOCK = GatedAttention
