"""Every flag of Megatron-LM's RL section is taken: with its meaning, with a note, or refused with the reason."""

from __future__ import annotations

import math
import re

import pytest

from megatron_rl.algorithms.batch import LOG_RATIO_LIMIT
from megatron_rl.algorithms.extension import correction_of
from megatron_rl.config.no_effect import no_effect
from megatron_rl.config.rl_config import all_spellings, resolve
from megatron_rl.config.rules import notes

MEGATRON = [
    "perform-rl-step", "rl-prompts-per-eval", "grpo-prompts-per-step", "grpo-group-size", "rl-generation-lag",
    "rl-max-inflight-requests", "rl-submission-granularity", "rl-consumption-granularity", "rl-durable-rollout-bank",
    "rl-rollout-bank-dir", "rl-rollout-bank-max-bytes", "grpo-iterations", "grpo-clamp-eps-lower",
    "grpo-clamp-eps-upper", "grpo-kl-beta", "grpo-entropy-term-weight", "grpo-filter-groups-with-same-reward",
    "langrl-env-config", "rl-default-temperature", "rl-default-top-p", "rl-default-top-k",
    "rl-offload-optimizer-during-inference", "rl-partial-rollouts", "rl-inference-logprobs-is-correction",
    "rl-importance-sampling-truncation-coef", "rl-use-sequence-packing", "rl-sequence-packing-max-sequences-per-bin",
    "rl-sequence-packing-algo", "rl-training-cuda-graphs", "rl-inference-tensor-model-parallel-size",
    "rl-inference-pipeline-model-parallel-size", "rl-inference-expert-model-parallel-size",
    "rl-inference-expert-tensor-model-parallel-size", "rl-inference-model-unified-memory-level",
    "rl-offload-inference-model-weights", "refit-method", "refit-execution-batch-bytes",
    "rl-verify-model-weights-swap", "rl-skip-bos-token", "rl-profile", "rl-profile-dir", "rl-inference-parsers",
]  # fmt: skip
"""Of Megatron-LM's `RLConfig`, November 2026."""


@pytest.mark.parametrize("name", MEGATRON)
def test_it_is_known(name):
    assert name in no_effect() or name in all_spellings()


def test_its_correction_is_ours(config):
    """Without a coefficient the weights are not truncated; a log-ratio is clamped before."""
    asked = resolve(config(rl_inference_logprobs_is_correction=True), 1)
    assert asked.algorithm.rl_correction == "token_tis"
    assert correction_of(asked).cap > math.exp(LOG_RATIO_LIMIT)
    flags = {"rl_inference_logprobs_is_correction": True, "rl_importance_sampling_truncation_coef": "10"}
    assert correction_of(resolve(config(**flags), 1)).cap == 10
    assert correction_of(resolve(config(rl_correction="token_tis"), 1)).cap == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rl_generation_lag": "1"}, "1 has no effect without --rl-partial-rollouts or --rl-surplus keep"),
        ({"rl_inference_tensor_model_parallel_size": "2"}, "'2' is not --tensor-model-parallel-size 1: rollouts"),
    ],
)
def test_what_is_not_built_is_refused(problems, changes, text):
    (problem,) = problems(**changes)
    assert text in problem


def test_what_changes_nothing_is_said(config, problems):
    flags = {"rl_generation_lag": "0", "rl_inference_tensor_model_parallel_size": "1", "refit_method": "nccl"}
    assert problems(**flags) == []
    (note,) = notes(config(**flags))
    assert note.startswith("--refit-method has no effect: rollouts read the weights that train")


@pytest.mark.parametrize(
    ("flags", "claims", "false"),
    [
        ({"rl_max_inflight_requests": "64", "rl_partial_rollouts": True}, "--rl-oversampling of partial", "at once$"),
        ({"rl_parallel_generation_tasks": "64", "rl_dynamic_sampling": True}, "--rl-oversampling", "at once$"),
        ({"rl_submission_granularity": "R", "rl_partial_rollouts": True}, "a step or resampling round", "all its"),
        ({"rl_submission_granularity": "G", "rl_dynamic_sampling": True}, "resampling round", "all its groups"),
        ({"rl_consumption_granularity": "G", "rl_partial_rollouts": True}, "all its groups", "takes them together"),
        ({"rl_durable_rollout_bank": True, "rl_partial_rollouts": True}, "but for --rl-partial-rollouts", "always"),
        ({"rl_rollout_bank_dir": "bank"}, "--save-interval turns on", "always"),
        ({"rl_offload_inference_model_weights": True, "rl_rollout_quantization": "fp8"}, "8-bit copies", "copied"),
        ({"no_bias_swiglu_fusion": True, "bf16": True}, "are not used", "always fused"),
        ({"rl_skip_bos_token": True}, "plain text gets a begin token", "says whether"),
        ({"inference_dynamic_batching_buffer_guaranteed_fraction": "0.1", "rl_kv_overcommit": "2"}, "overcommit",
         "waits until"),
        ({"log_progress": True}, "with --log-throughput FLOP/s", "of every step"),
        ({"log_memory_to_tensorboard": True}, "of a GPU", "memory figures are"),
        ({"timing_log_option": "all"}, "rank 0's seconds", "minimum and maximum"),
        ({"exit_signal_handler": True, "eval_only": True}, "training then saves", "always saves"),
        ({"num_workers": "4"}, "processes of their own", "in the training process"),
    ],
)  # fmt: skip
def test_a_note_is_true_beside_the_other_flags(config, flags, claims, false):
    """Of each flag that has no effect: what the program does instead, with the flags that change that."""
    flag = next(iter(flags)).replace("_", "-")
    lines = [line for line in notes(config(**flags)) if line.split(" has no effect")[0].endswith(flag)]
    assert len(lines) == 1 and claims in lines[0] and not re.search(false, lines[0]), lines
