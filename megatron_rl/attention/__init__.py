"""Attention over packed sequences (training, prefill) and over the rollout engine's KV cache.

Both phases take the same way: `PlannedSelfAttention` projects, an `AttentionPlan` rotates and
attends. One file a backend, in `backends/`, computes the product itself; `selection` chooses.
"""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
from megatron_rl.attention.context import ContextPlan
from megatron_rl.attention.plan import AttentionPlan, PackedPlan, Ropes, RopeTable
from megatron_rl.attention.selection import Attention, attention_of, checked_attention, choose, numbers_of
from megatron_rl.attention.self_attention import PlannedSelfAttention

__all__ = [
    "Attention", "AttentionPlan", "ContextPlan", "PackedPlan", "PlannedSelfAttention", "RopeTable", "Ropes",
    "attention_of", "choose", "numbers_of", "checked_attention",
]  # fmt: skip
