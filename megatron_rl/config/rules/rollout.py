"""The rollout engine, sampling and the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.wording import Rule
from megatron_rl.registry import LOSSES


def _stop_strings(config: RLConfig) -> Iterator[str]:
    if "" in config.rollout.rl_stop_strings:
        yield "--rl-stop-strings has an empty text, which would end every answer at its first token; leave it out"


def _kv_cache(config: RLConfig) -> Iterator[str]:
    given = config.rollout.inference_dynamic_batching_buffer_size_gb
    longest = config.rollout.inference_max_seq_length
    if None in (given, longest) or not config.model.is_complete:
        return
    needed = config.kv_cache_bytes(longest) / 2**30
    if given < needed:
        yield (
            f"--inference-dynamic-batching-buffer-size-gb {given:g} cannot hold one sequence: {longest} "
            f"tokens of this model in {config.kv_cache_dtype} take {needed:.3g} GiB on each of "
            f"{config.parallel.tensor_model_parallel_size} tensor-parallel ranks; "
            f"use at least {math.ceil(needed * 100) / 100:g}"
        )


def _server_type(config: RLConfig) -> Iterator[str]:
    kind = config.environment.langrl_inference_server_type
    if kind != "inplace_megatron":
        yield (
            f"--langrl-inference-server-type {kind} is refused: the tokenizer's chat template already "
            "renders chat prompts; use inplace_megatron"
        )


def _whole_distribution(config: RLConfig) -> Iterator[str]:
    """Evaluation may cut the distribution; in training the ratio of new to old would be of two different ones."""
    rollout = config.rollout
    for flag, value, off in (("--rl-top-p", rollout.rl_top_p, 1.0), ("--rl-top-k", rollout.rl_top_k, 0)):
        if config.training.perform_rl_step and value != off:
            yield (
                f"{flag} {value} with --perform-rl-step: the trainer's log-probs are of the whole distribution, "
                f"not of the tokens that were left to sample from; use {flag} {off:g}"
            )


def _mcore_engine(config: RLConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rl_inference_engine == "mcore" and rollout.rl_temperature != 1.0:
        yield (
            f"--rl-temperature {rollout.rl_temperature} with --rl-inference-engine mcore: its log-probs are of the "
            "raw logits, not of what was sampled; use --rl-temperature 1, or --rl-inference-engine rollout"
        )


def _overcommit(config: RLConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rl_inference_engine == "mcore" and rollout.rl_kv_overcommit > 1:
        yield (
            f"--rl-kv-overcommit {rollout.rl_kv_overcommit:g} with --rl-inference-engine mcore: megatron-core's engine "
            "hands out its own KV cache; leave it out, or use --rl-inference-engine rollout"
        )


def _loss_aggregation(config: RLConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.calculate_per_token_loss and algorithm.rl_loss_aggregation != "token-mean":
        yield (
            f"--calculate-per-token-loss means token-mean, but --rl-loss-aggregation is "
            f"{algorithm.rl_loss_aggregation}; keep one of them"
        )


def _dual_clip(config: RLConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.rl_dual_clip is not None and LOSSES.stated(algorithm.rl_policy_loss, "HAS_DUAL_CLIP") is False:
        yield (
            f"--rl-policy-loss {algorithm.rl_policy_loss} has no dual clip and would ignore --rl-dual-clip "
            f"{algorithm.rl_dual_clip:g}; leave it out, or use clip or gspo"
        )


RULES: tuple[Rule, ...] = (
    _stop_strings, _kv_cache, _server_type, _whole_distribution, _mcore_engine, _overcommit, _loss_aggregation,
    _dual_clip,
)
