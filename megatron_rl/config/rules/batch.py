"""Batches, groups and sequence lengths: what a rollout brings must fit what an update takes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.wording import Rule, WorldRule, named, nearest_divisors, nearest_multiples
from megatron_rl.registry import ADVANTAGES

MOST_SAMPLES = 10_000_000


def _global_batch(config: RLConfig, world_size: int) -> Iterator[str]:
    """In RL any number of groups and samples is dealt to the ranks by tokens."""
    batch, replicas = config.training.global_batch_size, config.data_parallel_size(world_size)
    if batch is None or config.training.perform_rl_step:
        return
    if batch % replicas and world_size % config.model_parallel_size == 0:
        yield (
            f"--global-batch-size {batch} is not divisible by {replicas} data-parallel replicas: each takes "
            f"an equal share; use {nearest_multiples(batch, replicas)}"
        )


def _length(config: RLConfig) -> Iterator[str]:
    samples, of_a_step = config.training.train_samples, config.samples_per_step
    if samples is not None and samples < of_a_step:
        yield f"--train-samples {samples} is less than one step of {of_a_step} samples; use at least {of_a_step}"


def _groups(config: RLConfig) -> Iterator[str]:
    algorithm = config.algorithm
    compares_groups = ADVANTAGES.stated(algorithm.rl_advantage, "BASELINE") != "batch"
    if config.training.perform_rl_step and algorithm.grpo_group_size == 1 and compares_groups:
        yield (
            f"--grpo-group-size 1: the advantage {algorithm.rl_advantage} compares the completions of one prompt, and "
            "one alone has none; use 2 or more, or --rl-advantage batch_norm"
        )


def _samples(config: RLConfig) -> Iterator[str]:
    samples, algorithm = config.samples_per_step, config.algorithm
    if config.training.perform_rl_step and samples > MOST_SAMPLES:
        yield (
            f"--grpo-prompts-per-step {algorithm.grpo_prompts_per_step} x --grpo-group-size "
            f"{algorithm.grpo_group_size} are {samples:,} samples a step, and no machine keeps the tokens of more than "
            f"{MOST_SAMPLES:,}; use fewer prompts"
        )


def _updates(config: RLConfig) -> Iterator[str]:
    samples, batch = config.samples_per_step, config.training.global_batch_size
    if config.training.perform_rl_step and samples and batch and samples % batch:
        algorithm = config.algorithm
        yield (
            f"--global-batch-size {batch} does not divide the {samples} samples of a rollout "
            f"({algorithm.grpo_prompts_per_step} prompts x {algorithm.grpo_group_size} completions); "
            f"use {nearest_divisors(samples, batch)}"
        )


def _lengths(config: RLConfig) -> Iterator[str]:
    rollout, training = config.rollout, config.training
    longest, positions = rollout.inference_max_seq_length, config.model.max_position_embeddings
    if longest is None:
        return
    what = named(config, "inference_max_seq_length", longest, "--seq-length")
    if positions is not None and max(longest, training.seq_length or 0) > positions:
        what = what if longest > positions else f"--seq-length {training.seq_length}"
        yield (
            f"{what} is beyond the model's --max-position-embeddings {positions}; use at most {positions}"
        )
    if rollout.rl_max_new_tokens is not None and rollout.rl_max_new_tokens >= longest:
        yield (
            f"--rl-max-new-tokens {rollout.rl_max_new_tokens} leaves no room for a prompt in {longest} "
            f"tokens (--inference-max-seq-length); use at most {longest - 1}"
        )
    bin_size = training.rl_sequence_packing_bin_size
    if training.perform_rl_step and bin_size is not None and bin_size < longest:
        what = named(config, "rl_sequence_packing_bin_size", bin_size, "--micro-batch-size x --seq-length")
        yield (
            f"{what} cannot hold one sequence of {longest} tokens (--inference-max-seq-length); "
            f"use at least {longest}"
        )


WORLD_RULES: tuple[WorldRule, ...] = (_global_batch,)
RULES: tuple[Rule, ...] = (_length, _groups, _samples, _updates, _lengths)
