"""Rollouts on a KV cache of fewer bits: what it takes, what it costs, and what it must not depend on."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.attention.kv_format import FP8, rounded_attention
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from tests.support.generation import generate, largest_gap, ragged_requests, randomise_vectors, rollout_engine, tokens
from tests.support.scoring import gaps, packed
from tests.support.tiny import tiny_config, tiny_policy

NARROW = pytest.mark.parametrize("stored", [torch.bfloat16, FP8], ids=["bf16", "fp8"])


@pytest.fixture(scope="module", params=["sdpa", "paged"])
def policy(one_rank: ParallelGroups, request: pytest.FixtureRequest) -> PolicyModel:
    """A tiny model over each layout of the cache."""
    model = tiny_policy(tiny_config(attention_backend=request.param))
    randomise_vectors(model)
    return model


def fp8_engine(policy: PolicyModel, **options: object) -> RolloutEngine:
    return rollout_engine(policy, kv_cache_dtype=FP8, **options)


def held(engine: RolloutEngine) -> int:
    return sum(buffer.nbytes for buffer in (*engine.cache.keys, *engine.cache.values))


def test_bytes_and_slots(policy: PolicyModel) -> None:
    plain, half, quarter = (rollout_engine(policy, kv_cache_dtype=d) for d in (None, torch.bfloat16, FP8))
    assert held(plain) == 2 * held(half) == 4 * held(quarter)
    budget = 2.5 * 4 * policy.layout.cache_numbers(48)
    wide, narrow = (
        rollout_engine(policy, max_batch_size=32, block_size=16, cache_budget_gb=budget / 2**30, kv_cache_dtype=d)
        for d in (None, FP8)
    )
    if policy.attention.cache.layout == "rows":
        assert (wide.max_batch_size, narrow.max_batch_size) == (2, 10)
    else:  # a sequence has three pages of 16, and one page is nobody's
        assert (wide.cache.keys[0].shape[0], narrow.cache.keys[0].shape[0]) == (7, 30)


@NARROW
def test_the_rounding_shows_and_is_all_there_is(
    one_rank: ParallelGroups, policy: PolicyModel, stored: torch.dtype
) -> None:
    """The trainer, its keys and values rounded in the same way, has the engine's log-probs: prompts included."""
    engine, requests = rollout_engine(policy, kv_cache_dtype=stored), ragged_requests(6, 2, max_new_tokens=16)
    batch = packed(requests, generate(policy, engine, requests))
    plain = gaps(policy, one_rank, batch, 1.0)
    with rounded_attention(policy.gpt.decoder.layers, engine.kv_format):
        rounded = gaps(policy, one_rank, batch, 1.0)
    assert plain.max() > 1e-3, "nothing was rounded"
    assert rounded.mean() < plain.mean() / 100
    assert gaps(policy, one_rank, batch, 1.0).max() == plain.max(), "the rounding was left behind"


@pytest.mark.each_value
@NARROW
def test_neither_neighbours_nor_slots_change_a_token(policy: PolicyModel, stored: torch.dtype) -> None:
    """Which prompts set the scales depends on the slots; tokens do not."""
    requests = ragged_requests(9, 4, max_new_tokens=16)
    reference = generate(policy, rollout_engine(policy, max_batch_size=36, kv_cache_dtype=stored), requests)
    for options in ({"max_batch_size": 1}, {"max_batch_size": 5}, {"max_batch_size": 16, "prefill_token_budget": 1}):
        groups = generate(policy, rollout_engine(policy, kv_cache_dtype=stored, **options), requests)
        assert tokens(groups) == tokens(reference), options
        assert largest_gap(groups, reference) < 1e-3, options


def test_scales_are_set_once_a_rollout_and_in_place(policy: PolicyModel) -> None:
    engine, requests = fp8_engine(policy, max_batch_size=2), ragged_requests(6, 2, max_new_tokens=8)
    place = engine.kv_format.key_scales.data_ptr()
    generate(policy, engine, requests[:1])
    first = engine.kv_format.key_scales.clone()
    generate(policy, engine, requests)
    assert torch.equal(engine.kv_format.key_scales, first), "the first prompts are the same"
    engine.kv_format.key_scales.fill_(1.0)
    generate(policy, engine, requests)
    assert torch.equal(engine.kv_format.key_scales, first)
    assert engine.kv_format.key_scales.data_ptr() == place
    assert not (first == 1.0).any()


def test_keys_beyond_all_bounds_leave_finite_log_probs(one_rank: ParallelGroups) -> None:
    """Scales are far too small for what decoding brings: it is clamped, never inf or NaN."""
    policy = tiny_policy()
    engine, requests = fp8_engine(policy), ragged_requests(4, 2, max_new_tokens=8)
    engine.begin(0, 0)
    numbers = engine.kv_format
    numbers.calibrate(0, torch.full((1, 1, 2, 8), 1e-20), torch.full((1, 1, 2, 8), 1e-20))
    numbers.calibrate(1, torch.full((1, 1, 2, 8), 1e-20), torch.full((1, 1, 2, 8), 1e-20))
    numbers.begin = lambda: None
    groups = generate(policy, engine, requests)
    assert numbers.key_scales.max() < 1e-10
    assert all(torch.tensor(c.inference_logprobs).isfinite().all() for group in groups for c in group)
