"""megatron's SelfAttention with rotation and attention of an `AttentionPlan`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention

from megatron_rl.families import PLAIN, LayerKind


class PlannedSelfAttention(SelfAttention):
    """Stock projections and norms; the plan rotates and attends.

    The plan is ``packed_seq_params`` in training and ``inference_context`` in rollouts. Without one (unpacked batches)
    the stock forward pass runs.
    """

    kind: LayerKind = PLAIN
    kv_rounding: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Rounds keys and values like a low-precision KV cache; see `kv_format.rounded_attention`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **stock: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; ``hidden_states`` [T, 1, hidden] (or [T / tensor ranks, 1, hidden] under sequence parallelism)."""
        plan = inference_context if inference_context is not None else packed_seq_params
        if not hasattr(plan, "attend"):
            return super().forward(
                hidden_states,
                attention_mask,
                key_value_states,
                inference_context=inference_context,
                packed_seq_params=packed_seq_params,
                **stock,
            )
        query, key, value = self.rotated(hidden_states, plan)
        if self.kv_rounding is not None:
            key, value = self.kv_rounding(key, value)
        attend = functools.partial(plan.attend, self.layer_number, kind=self.kind, sinks=self.sinks)
        if self.training and self.checkpoint_core_attention:
            attend = functools.partial(tensor_parallel.checkpoint, attend, False)
        return self.linear_proj(attend(query, key, value))

    def rotated(self, hidden_states: torch.Tensor, plan: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated query and key, and value, [T, 1, heads, D] each."""
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        return plan.rotate(self.scaled(query), self.kind), plan.rotate(key, self.kind), value

    @property
    def sinks(self) -> torch.Tensor | None:
        """[query heads of this rank] in layers with attention sinks."""
        return self.core_attention.softmax_offset if self.kind.sinks else None

    def scaled(self, query: torch.Tensor) -> torch.Tensor:
        """Scale queries for the layer's softmax scale, given that kernels multiply scores by 1 / sqrt(D)."""
        scale = self.kind.scale
        return query if scale is None else query * (scale * math.sqrt(query.shape[-1]))
