"""Evaluations sample as rollouts do, unless a flag of their own says otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl.config.rl_config import resolve
from megatron_rl.run.generation import evaluation_factory, request_factory

TOKENIZER = SimpleNamespace(special_tokens={})


def test_the_defaults_are_those_of_rollouts(config):
    asked = resolve(config(rl_temperature="0.7", rl_top_k="5", rl_top_p="0.9", rl_max_new_tokens="20"), 1)
    assert evaluation_factory(asked, TOKENIZER) == request_factory(asked, TOKENIZER)


def test_each_can_be_said_apart(config):
    flags = {"rl_eval_temperature": "0.6", "rl_eval_top_k": "20", "rl_eval_top_p": "0.95"}
    asked = resolve(config(rl_max_new_tokens="20", rl_eval_max_new_tokens="50", **flags), 1)
    sampling = evaluation_factory(asked, TOKENIZER).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_new_tokens) == (0.6, 20, 0.95, 50)
    assert evaluation_factory(asked, TOKENIZER).max_prompt_tokens == 128 - 50
    assert request_factory(asked, TOKENIZER).sampling.max_new_tokens == 20


def test_megatrons_off_is_off(config):
    """A top-p of 0 would leave the likeliest token alone, which is greedy."""
    asked = resolve(config(rl_eval_top_p="0", rl_eval_top_k="-1"), 1)
    sampling = evaluation_factory(asked, TOKENIZER).sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 0)
    assert resolve(asked, 1) == asked


def test_longer_than_the_cache_is_refused(problems):
    (problem,) = problems(rl_max_new_tokens="20", rl_eval_max_new_tokens="128")
    assert problem.startswith("--rl-eval-max-new-tokens 128 leaves no room for a prompt in 128 tokens")
    (problem,) = problems(rl_max_new_tokens="128")
    assert problem.startswith("--rl-max-new-tokens")


@pytest.mark.parametrize(
    "asked",
    [
        {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
        {"rl_train_forward": "quantized", "rl_rollout_quantization": "fp8_block_pow2"},
        {"rl_train_forward": "quantized", "rl_train_backward": "quantized",
         "rl_rollout_quantization": "fp8_block_pow2"},
    ],
)  # fmt: skip
def test_a_command_of_aligned_training_evaluates_too(config, problems, asked):
    """Answers are drawn in the rollouts' format; the trainer's is nobody's concern."""
    flags = {"eval_only": True, "load": "checkpoints", **asked}
    assert problems(**flags) == []
    found = resolve(config(**flags), 1)
    formats = found.quantization
    assert (formats.rl_rollout_quantization, formats.rl_train_forward) == ("fp8_block_pow2", "plain")
    assert resolve(found, 1) == found
