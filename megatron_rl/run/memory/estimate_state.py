"""Bytes that training holds of a model, policy or critic, on one rank: weights, gradients, optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import ModelLayout

_FP32 = 4
_PARAMETER_START = 64
_BUCKET_END = 128
"""Multiples, in numbers, at which megatron's distributed optimizer starts a parameter and ends a bucket."""
_BUCKET = 40_000_000
_BUCKET_A_REPLICA = 1_000_000
"""Megatron's numbers in a bucket: the first, or with more than 40 replicas the second times the replicas."""


@dataclass(frozen=True)
class TrainingState:
    """What training holds of a model on one rank, in bytes."""

    numbers: int
    """Parameters."""
    weights: int
    gradients: int
    optimizer: int
    kept: int
    """Of the optimizer's, all but fp32 gradients."""


NO_STATE = TrainingState(0, 0, 0, 0, 0)


def training_state(config: RLConfig, layout: ModelLayout, copies: int, world_size: int) -> TrainingState:
    """Of a rank with ``layout``; ``copies`` ranks have the same weights."""
    number = 2 if config.precision.bf16 else _FP32
    gradient = _FP32 if config.precision.accumulate_allreduce_grads_in_fp32 else number
    buffers = _buffers(config, layout, copies, world_size)
    buffer = updated = 0
    for sizes, owners in buffers:
        padded = _buffer_elements(sizes, config, owners, layout.is_first)
        # Of the rank with the largest shard; the buffer's padding has no state, but a shard may be all parameters.
        updated += min(sum(sizes), padded // owners) if config.parallel.use_distributed_optimizer else sum(sizes)
        buffer += padded
    moments = 2 if config.optimizer.optimizer == "adam" else int(config.optimizer.sgd_momentum > 0)
    kept = _FP32 * (moments + int(config.precision.bf16)) * updated  # fp32 parameters are their own main parameters
    return TrainingState(
        numbers=sum(sum(sizes) for sizes, _ in buffers),
        # With the distributed optimizer parameters lie in a buffer that is padded like the gradients'.
        weights=buffer * number,
        gradients=buffer * gradient,
        optimizer=kept + (_FP32 * updated if gradient != _FP32 else 0),
        kept=kept,
    )


def _buffers(
    config: RLConfig, layout: ModelLayout, copies: int, world_size: int
) -> list[tuple[list[int], int]]:
    """Sizes of the parameters that share a gradient buffer, and how many ranks hold the same; experts on several ranks
    have one of their own.
    """
    are_shared = config.parallel.expert_model_parallel_size > 1
    kinds: dict[bool, list[int]] = {False: []}
    for parameter in layout.parameters:
        kinds.setdefault(are_shared and parameter.is_of_an_expert, []).append(parameter.size)
    return [(sizes, world_size // config.expert_parallel_ranks if kind else copies) for kind, sizes in kinds.items()]


def _buffer_elements(sizes: Iterable[int], config: RLConfig, replicas: int, in_buckets: bool) -> int:
    """Numbers in the contiguous buffer of megatron's DDP; ``sizes`` in the model's order.

    With the distributed optimizer parameters start aligned and buckets can be cut into equal shards. megatron has no
    buckets but on the first pipeline stage.
    """
    sharded = config.parallel.use_distributed_optimizer
    in_buckets = in_buckets and config.parallel.overlap_grad_reduce
    bucket = max(_BUCKET, _BUCKET_A_REPLICA * replicas) if in_buckets else None
    bucket_end = math.lcm(replicas, _BUCKET_END)
    bucket_start = end = 0
    for size in reversed(list(sizes)):
        end = (_round_up(end, _PARAMETER_START) if sharded else end) + size
        if bucket is not None and end - bucket_start >= bucket:
            bucket_start = end = _round_up(end, bucket_end) if sharded else end
    return _round_up(end, bucket_end) if sharded else end


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
