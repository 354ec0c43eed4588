"""How completions are sampled, and the engine that samples them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling and the rollout engine."""

    rl_inference_engine: Literal["rollout", "mcore"] = flag("rollout")
    """The engine: ours, or megatron-core's dynamic engine on the same model."""
    rl_temperature: float = flag(
        1.0, ge=0.001, le=100, aliases=("--rl-default-temperature", "--grpo-default-temperature"), common=True
    )
    """Sampling temperature."""
    rl_top_p: float = flag(1.0, ge=0, le=1, aliases=("--rl-default-top-p", "--grpo-default-top-p"))
    """Sample from the likeliest tokens that make up this probability; 1, and Megatron's 0, are off."""
    rl_top_k: int = flag(0, ge=-1, aliases=("--rl-default-top-k", "--grpo-default-top-k"))
    """Sample from this many likeliest tokens; 0, and Megatron's -1, are off."""
    rl_max_new_tokens: int | None = flag(None, ge=1, common=True)
    """Longest completion in tokens. Without it what --inference-max-seq-length leaves."""
    rl_stop_strings: tuple[str, ...] = flag(())
    """Texts that end a completion; one that is a special token is looked for by its id."""
    rl_decode_steps_per_sync: int = flag(8, ge=1)
    """Decode steps between two looks of the host at what has finished; on a CPU fewer where completions end often."""
    inference_max_batch_size: int | None = flag(None, ge=1, le=100_000, aliases=("--inference-max-requests",))
    """Completions decoded at once on a replica. Without it its share of a step, at most 256."""
    inference_max_seq_length: int | None = flag(None, ge=2)
    """Longest prompt and completion together. Without it --seq-length."""
    inference_dynamic_batching_buffer_size_gb: float | None = flag(
        None, gt=0, aliases=("--inference-buffer-size-gb",)
    )
    """Most GiB of KV cache a rank. Without it what the largest batch needs, if it is free (Megatron's default: 40)."""
    inference_dynamic_batching_max_tokens: int = flag(8192, ge=1)
    """Prompt tokens computed between two bursts of decode steps; a longer prompt enters in pieces."""
    rl_prefix_reuse: bool = flag(True, off="--no-rl-prefix-reuse")
    """Prompts go on from what the KV cache has of their beginning: the turns of a conversation so far."""
    rl_kv_overcommit: float = flag(1.0, ge=1, le=100)
    """How often the pages of the KV cache may be promised; 1 keeps room for the longest completions there can be.
    Above it, a completion that finds no room makes way and is computed again."""
    inference_dynamic_batching_num_cuda_graphs: int = flag(
        16, ge=1, aliases=("--inference-num-cuda-graphs",)
    )
    """With --enable-cuda-graph: most batch sizes to capture; a batch is rounded up to the next of them."""
    inference_dynamic_batching: bool = flag(False, note="the rollout engine always batches dynamically")
    """Megatron's switch for dynamic batching."""
    inference_dynamic_batching_block_size: int | None = flag(None, ge=1, le=65_536)
    """Tokens a page of the KV cache, on backends that have pages. Without it 64 (triton_paged, paged) or 256."""
    inference_dynamic_batching_buffer_guaranteed_fraction: float = flag(
        0.2, note="a completion is admitted only when its KV blocks are there, so none is reserved"
    )
    """Megatron's reserved share of the KV cache."""
    inference_dynamic_batching_unified_memory_level: int = flag(
        0, note="the KV cache stays in device memory; --inference-dynamic-batching-buffer-size-gb bounds it"
    )
    """Megatron's KV cache in unified memory."""
    rl_partial_rollouts: bool = flag(False, note="every completion is finished by the policy that began it")
    """Megatron's completions that go on over an update."""
    rl_offload_optimizer_during_inference: bool = flag(False)
    """Optimizer state waits in host memory during rollouts, and gradient buffers are given up: room for KV cache."""
