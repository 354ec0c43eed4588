"""Triton kernels for what a decoder layer does between its products, in rollouts on CUDA.

The eager twin of each is in `megatron_rl.models.rollout_ops`. The modules below import Triton, so import them only on
CUDA:

- `rows`: residual + last product and RMSNorm, or ``silu(gate) x up``; with the next product's quantisation;
- `rotate_store`: norms of query and key, rotation, and the cache's key and value.
"""
