"""Tasks and their graders, how completions are sampled, and the engine that samples them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, flag
from megatron_rl.errors import Problem

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

MOST_DECODED_AT_ONCE = 256
"""Bound of the default decode batch: beyond it, the KV cache grows faster than the throughput."""


def _longest(config: RLConfig, _: int = 1) -> int | None:
    return config.rollout.inference_max_seq_length or config.training.seq_length


def _decoded_at_once(config: RLConfig, world_size: int) -> int:
    """A replica's share of what is wanted at once: a rollout's, or in supervised training an evaluation's."""
    environment, algorithm = config.environment, config.algorithm
    prompts, samples = environment.rl_prompts_per_eval, environment.rl_samples_per_eval_prompt
    if config.training.perform_rl_step:
        prompts = max(algorithm.grpo_prompts_per_step or 0, algorithm.rl_oversampling or 0)
        samples = algorithm.grpo_group_size or 0
    share = math.ceil(prompts / config.rollout_replicas(world_size)) * samples  # a group stays on one rank
    return max(1, min(share, MOST_DECODED_AT_ONCE))


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Environments, their server, and evaluation."""

    langrl_env_config: str | None = flag(
        None, path=True, or_entry=True, aliases=("--env-config",), common=True,
        needed=("it names the tasks to train on", "environments.yaml"),
    )
    """YAML list of environments and their weights; or one entry in braces, '{environment: gsm8k}'."""
    rl_prompts_per_eval: int = flag(64, ge=1, le=1_000_000)
    """Prompts per evaluation and environment (Megatron's default: 32)."""
    rl_samples_per_eval_prompt: int = flag(8, ge=1, le=100_000)
    """Completions per evaluation prompt."""
    rl_environment_port: int = flag(0, ge=0, le=65535)
    """Port of the environment server on loopback; 0 takes any free port."""
    rl_endpoint_port: int = flag(0, ge=0, le=65535)
    """First port of the OpenAI-compatible endpoint that harnesses call, on loopback; each further replica takes the
    next port. 0 takes any free port."""
    rl_edited_history: Literal["split", "mask"] = flag("split")
    """Samples whose harness rewrote the model's earlier answers: split trains on every sequence that was sampled, mask
    excludes the sample."""
    rl_harness_processes: int = flag(64, ge=1, le=4096)
    """Most harness processes that run at once on a node, one per sample."""
    rl_environment_load_timeout: float = flag(300.0, gt=0, le=86_400)
    """Seconds that an environment may take to be imported, to be set up, or to list the tasks of a split. Also the
    limit for importing and trying an extension of your own, such as a loss."""
    rl_grade_timeout_seconds: float = flag(30.0, ge=0.001, le=86_400)
    """Seconds to wait for grades while no grading worker makes progress; later grades count as failed."""
    rl_max_failed_share: float = flag(0.05, ge=0, le=1)
    """Stop the run when more than this fraction of a step's grades failed."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling parameters and the rollout engine."""

    rl_temperature: float = flag(
        1.0, ge=0.001, le=100, aliases=("--rl-default-temperature", "--grpo-default-temperature"), common=True
    )
    """Sampling temperature."""
    rl_top_p: float = flag(1.0, ge=0, le=1, aliases=("--rl-default-top-p", "--grpo-default-top-p"))
    """Top-p (nucleus) sampling; 1, or Megatron's 0, turns it off."""
    rl_top_k: int = flag(0, ge=-1, aliases=("--rl-default-top-k", "--grpo-default-top-k"))
    """Top-k sampling; 0, or Megatron's -1, turns it off."""
    rl_max_new_tokens: int | None = flag(
        None, ge=1, common=True, derived=lambda config, _: (_longest(config) or 1) - 1 or None
    )
    """Longest completion in tokens, e.g. 1024. Default: what --inference-max-seq-length leaves."""
    rl_eval_temperature: float | None = flag(
        None, ge=0.001, le=100, derived=lambda config, _: config.rollout.rl_temperature
    )
    """Sampling temperature of evaluations. Default: --rl-temperature."""
    rl_eval_top_p: float | None = flag(None, ge=0, le=1, derived=lambda config, _: config.rollout.rl_top_p)
    """Top-p of evaluations. Default: --rl-top-p."""
    rl_eval_top_k: int | None = flag(None, ge=-1, derived=lambda config, _: config.rollout.rl_top_k)
    """Top-k of evaluations. Default: --rl-top-k."""
    rl_eval_max_new_tokens: int | None = flag(
        None, ge=1, derived=lambda config, _: config.rollout.rl_max_new_tokens, source="--rl-max-new-tokens"
    )
    """Longest completion of an evaluation, in tokens. Default: --rl-max-new-tokens."""
    rl_stop_strings: tuple[str, ...] = flag(())
    """Strings that end a completion, e.g. '</answer>'. A special token is matched by its id."""
    rl_decode_steps_per_sync: int = flag(8, ge=1)
    """Decode steps between two checks on the host of which completions have finished. On a GPU it checks before the
    last quarter, and plans meanwhile. On a CPU the engine takes fewer if completions end often."""
    inference_max_batch_size: int | None = flag(
        None, ge=1, le=100_000, aliases=("--inference-max-requests",), derived=_decoded_at_once
    )
    """Most completions decoded at once on a replica. Default: the replica's share of a step, at most 256."""
    inference_max_seq_length: int | None = flag(None, ge=2, derived=_longest, source="--seq-length")
    """Longest prompt plus completion in rollouts, in tokens. Default: --seq-length."""
    inference_dynamic_batching_buffer_size_gb: float | None = flag(None, gt=0, aliases=("--inference-buffer-size-gb",))
    """Largest KV cache of a rank in GiB. Default: what the largest batch needs, as far as memory is free (Megatron's
    default: 40)."""
    rl_rollout_memory_fraction: float | None = flag(None, gt=0, le=1)
    """Largest KV cache as a fraction of the memory that is free in a rollout (default 0.9)."""
    inference_dynamic_batching_max_tokens: int = flag(8192, ge=1)
    """Most prompt tokens computed between two host checks. A longer prompt is computed in chunks (chunked prefill)."""
    rl_prefix_reuse: bool = flag(True, off="--no-rl-prefix-reuse")
    """Prefix caching, which reuses the KV cache of an earlier prompt with the same beginning, such as the previous
    turns of a conversation."""
    rl_router_replay: bool = flag(False)
    """Router replay: in training, send each token to the experts that the rollout chose for it."""
    rl_kv_overcommit: float = flag(1.0, ge=1, le=100)
    """Pages of the KV cache that are promised to completions, as a multiple of the pages that exist, e.g. 1.5. Above 1,
    a completion that finds no free page is preempted and its cache recomputed."""
    inference_dynamic_batching_num_cuda_graphs: int = flag(16, ge=1, aliases=("--inference-num-cuda-graphs",))
    """Most batch sizes to capture in CUDA graphs. A batch is padded to the next captured size."""
    inference_dynamic_batching_block_size: int | None = flag(None, ge=1, le=65_536)
    """Tokens per page of the KV cache, for paged attention backends. Default: 64 (triton_paged, paged) or 256."""
    rl_offload_optimizer_during_inference: bool = flag(False)
    """Move the optimizer state to host memory during rollouts, to make room for the KV cache."""
    rl_keep_in_rollouts: tuple[Literal["weights", "gradients", "teacher"], ...] = flag(())
    """Keep in memory during rollouts what is otherwise freed and rebuilt: weights that have 8-bit copies (freed with
    --bf16 and --use-distributed-optimizer), gradient buffers, the teacher's weights."""


def length_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report lengths that do not fit the engine, the model's positions or the trainer's micro-batches."""
    rollout, training, positions = config.rollout, config.training, config.model.max_position_embeddings
    longest, bin_size = rollout.inference_max_seq_length, config.training.rl_sequence_packing_bin_size
    if longest is None:
        return
    if positions is not None and max(longest, training.seq_length or 0) > positions:
        name = "inference_max_seq_length" if longest > positions else "seq_length"
        yield name, f"is beyond the model's --max-position-embeddings {positions}; use at most {positions}"
    for name in ("rl_max_new_tokens", "rl_eval_max_new_tokens"):
        if (config.value(name) or 0) >= longest and (name in config.typed or name == "rl_max_new_tokens"):
            yield name, (
                f"leaves no room for a prompt in {longest} tokens (--inference-max-seq-length); use at most "
                f"{longest - 1}"
            )
    if training.perform_rl_step and bin_size is not None and bin_size < longest:
        yield "rl_sequence_packing_bin_size", (
            f"cannot hold one sequence of {longest} tokens (--inference-max-seq-length); use at least {longest}"
        )
    given = rollout.inference_dynamic_batching_buffer_size_gb
    is_known = config.has_shape and config.stages.sizes(config.model.num_layers)
    needed = config.kv_cache_bytes(longest) / 2**30 if given is not None and is_known else 0.0
    if given is not None and given < needed:
        yield "inference_dynamic_batching_buffer_size_gb", (
            f"cannot hold one sequence: {longest} tokens of this model in {config.kv_cache_dtype} take {needed:.3g} "
            f"GiB on each of {config.parallel.tensor_model_parallel_size} tensor-parallel ranks; use at least "
            f"{math.ceil(needed * 100) / 100:g}"
        )


def cache_size_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report limits of the KV cache that exclude each other."""
    given = config.rollout.inference_dynamic_batching_buffer_size_gb
    if given is not None and config.rollout.rl_rollout_memory_fraction is not None:
        yield "rl_rollout_memory_fraction", (
            f"and --inference-dynamic-batching-buffer-size-gb {given:g} both limit the KV cache; leave one of them out"
        )


def sampling_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report sampling that the trainer would not score as such, or that the chosen engine cannot do."""
    rollout = config.rollout
    if "" in rollout.rl_stop_strings:
        yield Problem(
            "--rl-stop-strings",
            "--rl-stop-strings has an empty text, which would end every answer at its first token; leave it out",
        )
    # Evaluation may cut the distribution; in training the ratio of new to old would be of two different ones.
    for name, off in (("rl_top_p", 1.0), ("rl_top_k", 0)):
        if config.training.perform_rl_step and getattr(rollout, name) != off:
            yield name, (
                "with --perform-rl-step: the trainer's log-probs are of the whole distribution; use "
                f"--{name.replace('_', '-')} {off:g}"
            )
    if rollout.rl_router_replay:
        yield from _replay_problems(config)


def _replay_problems(config: RLConfig) -> Iterator[Finding]:
    name = "rl_router_replay"
    if config.model.num_experts is None:
        yield name, "without --num-experts: dense layers have no router; leave it out"
    if not config.training.perform_rl_step:
        yield name, "without --perform-rl-step: demonstrations were never routed; leave it out"
    if config.algorithm.has_stale_samples and config.stages.count > 1:
        which = "--rl-partial-rollouts" if config.algorithm.rl_partial_rollouts else "--rl-surplus keep"
        yield name, f"with {which} on pipeline stages: groups that wait have one stage's experts; leave one of them out"
