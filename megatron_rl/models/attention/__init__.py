"""Attention over packed sequences (training, prefill) and over the rollout engine's KV cache.

Both phases take the same way: `PlannedSelfAttention` projects, an `AttentionPlan` rotates and
attends. One file a backend, in `backends/`, computes the product itself; `selection` chooses.
"""
