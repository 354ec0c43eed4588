"""Attention over packed sequences (training, prefill) and over the rollout engine's KV cache.

`PlannedSelfAttention` projects, an `AttentionPlan` rotates and attends, with a kernel of ``backends/`` (one file per
backend) chosen by `selection`.
"""
