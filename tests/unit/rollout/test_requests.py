"""How much room a prompt leaves for the answer."""

from __future__ import annotations

import pytest

from megatron_rl.rollout.prompt_source import RequestFactory
from megatron_rl.types import SamplingParams, SourcedTask, Task


def draw(length: int) -> SourcedTask:
    return SourcedTask("toy", Task("t", "prompt"), prompt_ids=(1,) * length)


@pytest.mark.parametrize(
    ("max_new_tokens", "longest_prompt"),
    [
        (16, 48),  # a full answer always fits
        (62, 2),
        (63, 63),  # "what is left": one token suffices
        (64, 63),
    ],
)
def test_the_longest_prompt_of_64_tokens(max_new_tokens: int, longest_prompt: int) -> None:
    factory = RequestFactory(SamplingParams(max_new_tokens=max_new_tokens), max_sequence_length=64)
    assert factory.max_prompt_tokens == longest_prompt


@pytest.mark.parametrize(("prompt", "room"), [(1, 16), (48, 16), (60, 4)])
def test_an_answer_never_leaves_the_sequence(prompt: int, room: int) -> None:
    factory = RequestFactory(SamplingParams(max_new_tokens=16), max_sequence_length=64)
    assert factory.request(draw(prompt), 4, 0).sampling.max_new_tokens == room


def test_a_request_keeps_the_sampling_and_may_be_greedy() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, max_new_tokens=8, stop=("#",))
    factory = RequestFactory(sampling, max_sequence_length=64)
    sampled, greedy = factory.request(draw(3), 4, index=7), factory.request(draw(3), 1, 8, greedy=True)
    assert sampled.sampling == sampling
    assert (sampled.num_samples, sampled.index, sampled.prompt_ids) == (4, 7, (1, 1, 1))
    assert greedy.sampling.greedy and greedy.sampling.stop == ("#",)
