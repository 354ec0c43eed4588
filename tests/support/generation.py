"""Prompts to completions, without tokenizer, environment or rollouter."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import torch

from megatron_rl.inference.engine import Engine, EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.groups import current_groups
from megatron_rl.types import Completion, Request, SamplingParams, SourcedTask, Task
from tests.support.tiny import VOCABULARY

END = 3
LETTERS = (string.ascii_letters + string.digits)[:VOCABULARY]
"""Token i is letter i."""


def letters(token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Decode: one letter a token."""
    return "".join(LETTERS[i] for i in token_ids)


def versions_of(completion: Completion) -> tuple[int, ...]:
    """The policy version of each token."""
    return tuple(version for version, size in completion.stretches for _ in range(size))


def request(
    prompt_ids: Sequence[int], num_samples: int = 1, index: int = 0, **sampling: object
) -> Request:
    """A group for the task ``task-<index>``."""
    source = SourcedTask("toy", Task(id=f"task-{index}", prompt=""))
    return Request(source, tuple(prompt_ids), num_samples, SamplingParams(**sampling), index)


def ragged_requests(
    count: int, num_samples: int = 1, longest_prompt: int = 12, seed: int = 0, **sampling: object
) -> list[Request]:
    """Random prompts of 1 to ``longest_prompt`` tokens."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest_prompt))] for _ in range(count)
    ]
    return [request(prompt, num_samples, index, **sampling) for index, prompt in enumerate(prompts)]


def rollout_engine(policy: PolicyModel, stop_ids: Sequence[int] = (END,), **options: object) -> RolloutEngine:
    """Our engine for a tiny model: 8 rows of 48 tokens unless said otherwise."""
    return RolloutEngine(policy, _sizes(options), stop_ids, letters, current_groups())


def mcore_engine(policy: PolicyModel, stop_ids: Sequence[int] = (END,), **options: object) -> Engine:
    """megatron-core's engine of the same sizes."""
    from tools.megatron_engine import McoreEngine  # with it comes wandb: a second of each rank's processor

    return McoreEngine(policy, _sizes(options), stop_ids)


def _sizes(options: dict[str, object]) -> EngineOptions:
    return EngineOptions(**{"max_batch_size": 8, "max_sequence_length": 48} | options)


def generate(
    policy: PolicyModel, engine: Engine, requests: Sequence[Request], seed: int = 1, version: int = 0
) -> list[tuple[Completion, ...]]:
    """Complete ``requests``; the result is in their order."""
    with rollout_mode(policy):
        engine.begin(seed, version)
        for wanted in requests:
            engine.submit(wanted)
        return drain(engine, requests)


def drain(engine: Engine, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
    """Step until everything submitted has come back; call it in rollout mode."""
    finished = {}
    while engine.has_unfinished:
        for done, completions in engine.step():
            assert done.index not in finished, "a group came back twice"
            finished[done.index] = completions
    return [finished[wanted.index] for wanted in requests]


def drain_with_pauses(engine: Engine, requests: Sequence[Request], seed: int) -> list[tuple[Completion, ...]]:
    """As `drain`, interrupted and begun again after 2 steps, 3 steps and so on."""
    finished, steps = {}, 2
    while engine.has_unfinished:
        for _ in range(steps):
            finished |= {done.index: completions for done, completions in engine.step()}
        put_aside, steps = engine.interrupt(), steps + 1
        engine.begin(seed, steps)
        for request in put_aside:
            if all(sample.finish_reason for sample in request.so_far):
                finished[request.index] = request.so_far
            else:
                engine.submit(request)
    assert steps > 3, "nothing was interrupted"
    return [finished[wanted.index] for wanted in requests]


def tokens(groups: Sequence[Sequence[Completion]]) -> list[tuple[int, ...]]:
    """The token ids of every completion, in order."""
    return [completion.token_ids for group in groups for completion in group]


def largest_gap(first: Sequence[Sequence[Completion]], second: Sequence[Sequence[Completion]]) -> float:
    """Largest difference between the log-probs of two results with the same tokens."""
    pairs = [
        (a, b)
        for one, other in zip(first, second, strict=True)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x.inference_logprobs, y.inference_logprobs, strict=True)
    ]
    return max(abs(a - b) for a, b in pairs)


def randomise_vectors(policy: PolicyModel, seed: int = 5) -> None:
    """Give biases and norm weights values: fresh ones are 0 and 1, and would hide a missing term."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.add_(noise.to(parameter.device, parameter.dtype))
