"""Choose and size the rollout engine."""

from __future__ import annotations

import logging

from megatron_rl.config import RLConfig
from megatron_rl.inference import Engine, RolloutEngine
from megatron_rl.inference.rollout_engine import EngineOptions
from megatron_rl.models import PolicyModel, kv_cache_dtype
from megatron_rl.parallel import ParallelGroups
from megatron_rl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def build_engine(
    config: RLConfig, policy: PolicyModel, tokenizer: Tokenizer, groups: ParallelGroups
) -> Engine:
    """`--rl-inference-engine`: ours, or megatron-core's own as oracle."""
    rollout = config.rollout
    if rollout.inference_dynamic_batching_block_size is not None and policy.attention.cache.layout == "slots":
        logger.warning(
            "--inference-dynamic-batching-block-size %d has no effect: %s keeps each sequence in one piece",
            rollout.inference_dynamic_batching_block_size, policy.attention.cache_name,
        )  # fmt: skip
    options = EngineOptions(
        max_batch_size=rollout.inference_max_batch_size,
        max_sequence_length=rollout.inference_max_seq_length,
        steps_per_host_read=rollout.rl_decode_steps_per_sync,
        cache_budget_gb=rollout.inference_dynamic_batching_buffer_size_gb,
        page_length=rollout.inference_dynamic_batching_block_size,
        kv_cache_dtype=kv_cache_dtype(config),
    )
    if rollout.rl_inference_engine == "mcore":
        from megatron_rl.inference.mcore import McoreEngine

        return McoreEngine(policy, options, [tokenizer.end_token_id])
    return RolloutEngine(
        policy, options, [tokenizer.end_token_id], tokenizer.decode, groups.tensor_group
    )

