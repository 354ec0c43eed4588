"""Choose and size the rollout engine."""

from __future__ import annotations

import logging

from megatron_rl.config import RLConfig
from megatron_rl.inference import Engine, RolloutEngine
from megatron_rl.inference.options import EngineOptions
from megatron_rl.models import PolicyModel, kv_cache_dtype
from megatron_rl.parallel import ParallelGroups
from megatron_rl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def build_engine(
    config: RLConfig,
    policy: PolicyModel,
    tokenizer: Tokenizer,
    groups: ParallelGroups,
    cache_budget_gb: float | None = None,
) -> Engine:
    """`--rl-inference-engine`: ours, or megatron-core's own as oracle.

    ``cache_budget_gb`` is what there is room for, in GiB; without it the user's flag counts.
    """
    rollout, kernels = config.rollout, config.kernels
    graphed = kernels.enable_cuda_graph or kernels.cuda_graph_impl == "local"
    if rollout.inference_dynamic_batching_block_size is not None and policy.attention.cache.layout == "slots":
        logger.warning(
            "--inference-dynamic-batching-block-size %d has no effect: %s keeps each sequence in one piece",
            rollout.inference_dynamic_batching_block_size, policy.attention.cache_name,
        )  # fmt: skip
    options = EngineOptions(
        max_batch_size=rollout.inference_max_batch_size,
        max_sequence_length=rollout.inference_max_seq_length,
        steps_per_host_read=rollout.rl_decode_steps_per_sync,
        prefill_token_budget=rollout.inference_dynamic_batching_max_tokens,
        reuse_prefixes=rollout.rl_prefix_reuse,
        kv_overcommit=rollout.rl_kv_overcommit,
        cache_budget_gb=cache_budget_gb or rollout.inference_dynamic_batching_buffer_size_gb,
        num_cuda_graphs=rollout.inference_dynamic_batching_num_cuda_graphs if graphed else None,
        page_length=rollout.inference_dynamic_batching_block_size,
        kv_cache_dtype=kv_cache_dtype(config),
    )
    by_id, _ = stop_strings(config, tokenizer)
    ends = [*tokenizer.end_token_ids, *by_id]
    if rollout.rl_inference_engine == "mcore":
        from megatron_rl.inference.mcore import McoreEngine

        return McoreEngine(policy, options, ends)
    return RolloutEngine(policy, options, ends, tokenizer.decode, groups.tensor_group)


def stop_strings(config: RLConfig, tokenizer: Tokenizer) -> tuple[list[int], tuple[str, ...]]:
    """`--rl-stop-strings`: the ids of those that are special tokens, which text does not have, and the others."""
    strings = config.rollout.rl_stop_strings
    special = tokenizer.special_tokens if strings else {}
    return [special[text] for text in strings if text in special], tuple(t for t in strings if t not in special)
