"""Choose and size the rollout engine."""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.inference import Engine, RolloutEngine
from megatron_rl.inference.options import EngineOptions
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.tokenizer import Tokenizer


def build_engine(
    config: RLConfig, policy: PolicyModel, tokenizer: Tokenizer, groups: ParallelGroups
) -> Engine:
    """`--rl-inference-engine`: ours, or megatron-core's own as oracle."""
    rollout = config.rollout
    options = EngineOptions(
        max_batch_size=rollout.inference_max_batch_size,
        max_sequence_length=rollout.inference_max_seq_length,
        steps_per_host_read=rollout.rl_decode_steps_per_sync,
        prefill_token_budget=rollout.inference_dynamic_batching_max_tokens,
        reuse_prefixes=rollout.rl_prefix_reuse,
        kv_overcommit=rollout.rl_kv_overcommit,
        cache_budget_gb=rollout.inference_dynamic_batching_buffer_size_gb,
    )
    if rollout.rl_inference_engine == "mcore":
        from megatron_rl.inference.mcore import McoreEngine

        return McoreEngine(policy, options, [tokenizer.end_token_id])
    return RolloutEngine(
        policy, options, [tokenizer.end_token_id], tokenizer.decode, groups.tensor_group
    )
