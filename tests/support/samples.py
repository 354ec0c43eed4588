"""Training samples and optimizations for the trainer's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.algorithms import StepRewards, Terms, TokenBatch
from megatron_rl.algorithms.batch import Sample
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.trainer.optimizer import Optimization
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy


def make_sample(
    token_ids: Sequence[int],
    prompt_length: int = 1,
    reward: float = 1.0,
    inference_logprob: float = -2.0,
    sample_id: int = 0,
    read: Sequence[tuple[int, int]] = (),
    **fields: Any,
) -> Sample:
    """A sample whose drawn tokens all have the same inference log-prob and version 0, but for ``fields``.

    ``read``: spans of ``token_ids`` that an environment wrote.
    """
    token_ids = torch.as_tensor(token_ids if torch.is_tensor(token_ids) else list(token_ids))
    logprobs = torch.full((len(token_ids),), inference_logprob)
    logprobs[:prompt_length] = 0.0
    mask = torch.arange(len(token_ids)) >= prompt_length
    for start, end in read:
        mask[start:end] = False
    given: dict[str, Any] = {
        "loss_mask": mask,
        "inference_logprobs": logprobs,
        "versions": torch.zeros_like(token_ids),
    }
    return Sample(token_ids=token_ids, reward=reward, sample_id=sample_id, **given | fields)


def random_samples(count: int, seed: int = 0) -> list[Sample]:
    """``count`` samples of 3 to 20 tokens, with rewards of both signs."""
    draw = random.Random(seed)
    return [
        make_sample(
            [draw.randrange(VOCABULARY) for _ in range(draw.randint(3, 20))],
            prompt_length=draw.randint(1, 2),
            reward=draw.uniform(-1, 1),
            inference_logprob=draw.uniform(-4, -3),
            sample_id=index,
        )
        for index in range(count)
    ]


def with_prompts(samples: Sequence[Sample], count: int, length: int = 7, seed: int = 0) -> list[Sample]:
    """The samples behind ``count`` prompts of ``length`` tokens in turn, which begin alike."""
    draw = random.Random(seed)
    begin = [draw.randrange(VOCABULARY) for _ in range(length // 2)]
    prompts = [begin + [draw.randrange(VOCABULARY) for _ in range(length - length // 2)] for _ in range(count)]
    return [
        make_sample(
            prompts[index % count] + sample.token_ids.tolist(),
            prompt_length=length + int(sample.loss_mask.long().argmax()),
            reward=sample.reward,
            inference_logprob=float(sample.inference_logprobs[-1]),
            sample_id=sample.sample_id,
        )
        for index, sample in enumerate(samples)
    ]


def with_experts(
    samples: Sequence[Sample], layers: Sequence[int], experts: int, topk: int, seed: int = 0
) -> list[Sample]:
    """The samples with random experts, of the layers named (from 0), the same whichever these are; none for the last
    token.
    """
    routed = []
    for sample in samples:
        draw = torch.Generator().manual_seed(1000 * seed + sample.sample_id)
        ids = torch.rand(sample.length, 16, experts, generator=draw).argsort(-1)[:, list(layers), :topk].byte()
        ids[-1] = torch.iinfo(torch.uint8).max
        routed.append(replace(sample, routing=ids))
    return routed


def rewards_of(samples: Sequence[Sample]) -> StepRewards:
    """A step of these samples, numbered from 0, each of a task of its own."""
    rewards = torch.tensor([sample.reward for sample in sorted(samples, key=lambda sample: sample.sample_id)])
    everything = torch.ones(len(samples), dtype=torch.bool)
    numbers = torch.arange(len(samples))
    return StepRewards(rewards, everything, numbers, everything, everything, everything.long())


def own_reward(batch: TokenBatch) -> Terms:
    """The advantage of a sample is its reward."""
    return batch.of_samples(batch.step.rewards), {}


def tiny_optimization(seed: int = 1, **changes: object) -> Optimization:
    """A tiny policy with its optimizer; gradients are not clipped unless ``changes`` say so."""
    config = tiny_config(**{"clip_grad": 0.0, **changes})
    return Optimization(tiny_policy(config, seed), config)


def weights_of(policy: PolicyModel) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in policy.gpt.parameters()]


def gradients_of(optimization: Optimization) -> dict[str, torch.Tensor]:
    """Copies of the gradients of the last update, by parameter."""
    named = optimization.policy.gpt.named_parameters()
    return {name: parameter.main_grad.detach().clone() for name, parameter in named}


def all_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
