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
    """Environments, their server and evaluation on them."""

    langrl_env_config: str | None = flag(
        None, path=True, aliases=("--env-config",), common=True,
        needed=("it names the tasks to train on", "environments.yaml"),
    )
    """YAML list of environments and their weights."""
    langrl_inference_server_type: Literal["inplace_megatron", "inplace_megatron_chat"] = flag(
        "inplace_megatron"
    )
    """What generates rollouts: the training model in its own process. Harnesses may ask for completions and for chats
    with both."""
    rl_prompts_per_eval: int = flag(64, ge=1, le=1_000_000)
    """Prompts of an evaluation, for each environment (Megatron's default: 32)."""
    rl_samples_per_eval_prompt: int = flag(8, ge=1, le=100_000)
    """Completions of each evaluation prompt."""
    rl_environment_port: int = flag(0, ge=0, le=65535)
    """Port of the environment server on loopback; 0 takes any free one."""
    rl_endpoint_port: int = flag(0, ge=0, le=65535)
    """Port of the OpenAI-compatible endpoint on loopback that harnesses call; 0 takes any free one.

    Each further copy of the model has the next port."""
    rl_edited_history: Literal["split", "mask"] = flag("split")
    """Samples whose harness sent answers as the model's that it never gave: split trains on every sequence that was
    sampled, mask leaves the sample out."""
    rl_harness_processes: int = flag(64, ge=1, le=4096)
    """Most samples of harnesses that run at once on a node, each in a process; the others wait."""
    rl_environment_load_timeout: float = flag(300.0, gt=0, le=86_400)
    """Longest time in seconds that an environment may take to be imported, to be set up, or to list a split's tasks.

    And an extension of your own, such as a loss, to be imported or called once before the run."""
    rl_grade_timeout_seconds: float = flag(30.0, ge=0.001, le=86_400)
    """Longest wait for the grades of one group; after it they count as failed."""
    rl_max_failed_share: float = flag(0.05, ge=0, le=1)
    """Stop the run when more than this share of a step's grades failed."""


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
    rl_max_new_tokens: int | None = flag(
        None, ge=1, common=True, derived=lambda config, _: (_longest(config) or 1) - 1 or None
    )
    """Longest completion in tokens. Without it what --inference-max-seq-length leaves."""
    rl_eval_temperature: float | None = flag(
        None, ge=0.001, le=100, derived=lambda config, _: config.rollout.rl_temperature
    )
    """Sampling temperature of evaluations. Without it --rl-temperature, and so on for the next three."""
    rl_eval_top_p: float | None = flag(None, ge=0, le=1, derived=lambda config, _: config.rollout.rl_top_p)
    """Top-p of evaluations; 1, and Megatron's 0, are off. Without it --rl-top-p."""
    rl_eval_top_k: int | None = flag(None, ge=-1, derived=lambda config, _: config.rollout.rl_top_k)
    """Top-k of evaluations; 0, and Megatron's -1, are off. Without it --rl-top-k."""
    rl_eval_max_new_tokens: int | None = flag(
        None, ge=1, derived=lambda config, _: config.rollout.rl_max_new_tokens, source="--rl-max-new-tokens"
    )
    """Longest completion of an evaluation in tokens. Without it --rl-max-new-tokens."""
    rl_stop_strings: tuple[str, ...] = flag(())
    """Texts that end a completion; one that is a special token is looked for by its id."""
    rl_decode_steps_per_sync: int = flag(8, ge=1)
    """Decode steps between two looks of the host at what has finished; on a CPU fewer where completions end often."""
    inference_max_batch_size: int | None = flag(
        None, ge=1, le=100_000, aliases=("--inference-max-requests",), derived=_decoded_at_once
    )
    """Completions decoded at once on a replica. Without it its share of a step, at most 256."""
    inference_max_seq_length: int | None = flag(None, ge=2, derived=_longest, source="--seq-length")
    """Longest prompt and completion together. Without it --seq-length."""
    inference_dynamic_batching_buffer_size_gb: float | None = flag(
        None, gt=0, aliases=("--inference-buffer-size-gb",)
    )
    """Most GiB of KV cache a rank. Without it what the largest batch needs, if it is free (Megatron's default: 40)."""
    rl_rollout_memory_fraction: float | None = flag(None, gt=0, le=1)
    """Most of the KV cache as a share of the memory that is free beside the rest of a rollout. Without it 0.9."""
    inference_dynamic_batching_max_tokens: int = flag(8192, ge=1)
    """Prompt tokens computed between two bursts of decode steps; a longer prompt enters in pieces."""
    rl_prefix_reuse: bool = flag(True, off="--no-rl-prefix-reuse")
    """Prompts go on from what the KV cache has of their beginning: the turns of a conversation so far."""
    rl_router_replay: bool = flag(False)
    """Experts: the trainer sends each token to those that the rollout chose for it."""
    rl_kv_overcommit: float = flag(1.0, ge=1, le=100)
    """How often the pages of the KV cache may be promised; 1 keeps room for the longest completions there can be.
    Above it, a completion that finds no room makes way and is computed again."""
    inference_dynamic_batching_num_cuda_graphs: int = flag(
        16, ge=1, aliases=("--inference-num-cuda-graphs",)
    )
    """With --enable-cuda-graph: most batch sizes to capture; a batch is rounded up to the next of them."""
    inference_dynamic_batching_block_size: int | None = flag(None, ge=1, le=65_536)
    """Tokens a page of the KV cache, on backends that have pages. Without it 64 (triton_paged, paged) or 256."""
    rl_offload_optimizer_during_inference: bool = flag(False)
    """Optimizer state waits in host memory during rollouts: room for KV cache."""
    rl_keep_in_rollouts: tuple[Literal["weights", "gradients", "teacher"], ...] = flag(())
    """What rollouts could do without and keep, to save the time of making it again: the weights that have quantised
    copies (given up with --bf16 and --use-distributed-optimizer), the gradient buffers, the teacher's weights."""


def length_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Prompts and completions must fit the engine, the model's positions and the trainer's bins."""
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
    is_known = config.model.is_complete and config.stages.sizes(config.model.num_layers)
    needed = config.kv_cache_bytes(longest) / 2**30 if given is not None and is_known else 0.0
    if given is not None and given < needed:
        yield "inference_dynamic_batching_buffer_size_gb", (
            f"cannot hold one sequence: {longest} tokens of this model in {config.kv_cache_dtype} take {needed:.3g} "
            f"GiB on each of {config.parallel.tensor_model_parallel_size} tensor-parallel ranks; use at least "
            f"{math.ceil(needed * 100) / 100:g}"
        )


def cache_size_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """One flag says how large the KV cache may become."""
    given = config.rollout.inference_dynamic_batching_buffer_size_gb
    if given is not None and config.rollout.rl_rollout_memory_fraction is not None:
        yield "rl_rollout_memory_fraction", (
            f"and --inference-dynamic-batching-buffer-size-gb {given:g} both say how large the KV cache may become; "
            "leave one of them out"
        )


def sampling_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """What is sampled must be what the trainer scores, and what the chosen engine can do."""
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
                "with --perform-rl-step: the trainer's log-probs are of the whole distribution, not of the tokens that "
                f"were left to sample from; use --{name.replace('_', '-')} {off:g}"
            )
    if rollout.rl_router_replay:
        yield from _replay_problems(config)
    if rollout.rl_inference_engine == "mcore":
        yield from _mcore_problems(config)


def _mcore_problems(config: RLConfig) -> Iterator[Finding]:
    """What megatron-core's own engine does not do."""
    rollout, raw = config.rollout, (("rl_eval_temperature", 1.0), ("rl_eval_top_p", 1.0), ("rl_eval_top_k", 0))
    for name, off in (("rl_temperature", 1.0), *(pair for pair in raw if pair[0] in config.typed)):
        if getattr(rollout, name) != off:
            yield name, (
                "with --rl-inference-engine mcore: its log-probs are of the raw logits, not of what was sampled; use "
                f"--{name.replace('_', '-')} {off:g}, or --rl-inference-engine rollout"
            )
    if rollout.rl_kv_overcommit > 1:
        yield "rl_kv_overcommit", (
            "with --rl-inference-engine mcore: megatron-core's engine hands out its own KV cache; leave it out, or use "
            "--rl-inference-engine rollout"
        )


def _replay_problems(config: RLConfig) -> Iterator[Finding]:
    name = "rl_router_replay"
    if config.model.num_experts is None:
        yield name, "without --num-experts: dense layers have no router; leave it out"
    if not config.training.perform_rl_step:
        yield name, "without --perform-rl-step: demonstrations were never routed; leave it out"
    if config.rollout.rl_inference_engine == "mcore":
        yield name, (
            "with --rl-inference-engine mcore, which does not record the experts it chose; use --rl-inference-engine "
            "rollout"
        )
    if config.algorithm.rl_surplus == "keep" and config.stages.count > 1:
        yield name, (
            "with --rl-surplus keep on pipeline stages: what is kept would have the experts of one stage's layers; use "
            "--rl-surplus drop"
        )
