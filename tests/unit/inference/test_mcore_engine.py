"""megatron-core's engine behind our protocol: what it refuses and what had to be repaired."""

from __future__ import annotations

import gc
import inspect
import threading
import warnings

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from tests.support.generation import generate, mcore_engine, ragged_requests, request, tokens
from tests.support.tiny import tiny_config, tiny_policy
from tools.megatron_engine import BLOCK_TOKENS

PROMPT = (4, 9, 17, 2)


@pytest.mark.parametrize(
    ("sampling", "flag"),
    [
        ({"temperature": 0.7}, "--rl-temperature 0.7"),
        ({"top_k": 5}, "--rl-top-k 5"),
        ({"top_p": 0.9}, "--rl-top-p 0.9"),
        ({"greedy": True, "top_k": 5}, "--rl-top-k 5"),
        ({"stop": ("</answer>",)}, "--rl-stop-strings </answer>"),
    ],
)
def test_what_its_logprobs_would_not_describe_is_refused(
    policy: PolicyModel, sampling: dict[str, object], flag: str
) -> None:
    engine = mcore_engine(policy)
    with pytest.raises(EngineError, match=f"asks for {flag}: megatron-core's engine"):
        engine.submit(request(PROMPT, max_new_tokens=8, **sampling))
    assert not engine.has_unfinished


def test_the_kv_buffer_starts_at_zero(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_empty = torch.empty

    def garbage(*size: object, **options: object) -> torch.Tensor:
        fresh = stock_empty(*size, **options)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", garbage)
    engine = mcore_engine(policy)
    assert not engine.stock.context.memory_buffer.any()


def test_nothing_is_evicted_when_every_sequence_fills_up(policy: PolicyModel) -> None:
    length = 3 * BLOCK_TOKENS
    engine = mcore_engine(policy, stop_ids=(), max_batch_size=5, max_sequence_length=length)
    wanted = [request([7] * (1 + i), index=i, max_new_tokens=length - 1 - i) for i in range(7)]
    groups = generate(policy, engine, wanted)
    assert [len(group[0].token_ids) for group in groups] == [length - 1 - i for i in range(7)]
    assert engine.stock.evicted_request_count == 0


def test_the_kv_budget_bounds_the_requests(policy: PolicyModel) -> None:
    per_sequence = 2 * 2 * 2 * 8 * BLOCK_TOKENS * 4  # key and value, layers, groups, width, tokens, bytes
    engine = mcore_engine(policy, cache_budget_gb=3.5 * per_sequence / 2**30)
    assert engine.max_batch_size == 3
    with pytest.raises(EngineError, match="too small for one sequence"):
        mcore_engine(policy, cache_budget_gb=0.5 * per_sequence / 2**30)


def test_a_small_prefill_budget_only_takes_longer(policy: PolicyModel) -> None:
    wanted = ragged_requests(12, longest_prompt=150, greedy=True, max_new_tokens=6)
    roomy = mcore_engine(policy, max_sequence_length=160)
    tight = mcore_engine(policy, max_sequence_length=160, prefill_token_budget=1)
    assert tokens(generate(policy, tight, wanted)) == tokens(generate(policy, roomy, wanted))


def test_a_bf16_model_is_sampled_from_fp32(one_rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 softmax has two or three digits: not the distribution whose log-prob is reported."""
    policy = tiny_policy(tiny_config(bf16=True))
    engine = mcore_engine(policy)
    draw, seen = torch.multinomial, set()

    def noted(probabilities: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        seen.add(probabilities.dtype)
        return draw(probabilities, *arguments, **named)

    monkeypatch.setattr(torch, "multinomial", noted)
    generate(policy, engine, [request(PROMPT, max_new_tokens=3)])
    assert seen == {torch.float32}


def test_every_sample_is_prefilled(policy: PolicyModel) -> None:
    engine = mcore_engine(policy)
    generate(policy, engine, [request(PROMPT, num_samples=3, max_new_tokens=2)])
    assert engine.statistics.prefill_tokens == 3 * len(PROMPT)


def test_no_thread_and_no_forgotten_coroutine(policy: PolicyModel) -> None:
    """The stock engine announces admissions to an event loop; ours has none to run them."""
    engine = mcore_engine(policy)
    threads = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # "was never awaited"
        generate(policy, engine, ragged_requests(4, max_new_tokens=3))
    waiting = [thing for thing in gc.get_objects() if inspect.iscoroutine(thing)]
    assert not [coroutine for coroutine in waiting if coroutine.__name__ == "_notify_cond_for_new_request"]
    assert threading.active_count() == threads


def test_finished_requests_are_forgotten(policy: PolicyModel) -> None:
    engine = mcore_engine(policy)
    with rollout_mode(policy):
        engine.begin(1, 0)
        engine.submit(request(PROMPT, num_samples=4, max_new_tokens=3))
        while engine.has_unfinished:
            engine.step()
    assert not engine.stock.requests
