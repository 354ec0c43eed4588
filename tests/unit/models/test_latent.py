"""Latent attention in rollouts: over the latents themselves, or over whole heads, it says what the trainer says."""

from __future__ import annotations

import pytest

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Completion, Request
from tests.support.generation import generate, largest_gap, ragged_requests, randomise_vectors, rollout_engine, tokens
from tests.support.scoring import gaps, packed
from tests.support.tape import taped
from tests.support.tiny import LATENT, tiny_config, tiny_policy

KEY = LATENT["kv_lora_rank"] + LATENT["qk_pos_emb_head_dim"]
CLOSE = 1e-5


def latent(**changes: object) -> PolicyModel:
    policy = tiny_policy(tiny_config(**LATENT | changes))
    randomise_vectors(policy)
    return policy


@pytest.fixture(scope="module", params=["sdpa", "paged"])
def policy(request: pytest.FixtureRequest, one_rank: ParallelGroups) -> PolicyModel:
    """Over slots and over pages."""
    return latent(attention_backend=request.param)


def wanted() -> list[Request]:
    """Two samples each of prompts that are prefilled once."""
    return ragged_requests(7, num_samples=2, max_new_tokens=20)


def gap(policy: PolicyModel, groups: ParallelGroups, done: list[tuple[Completion, ...]]) -> float:
    """The largest between trainer and engine."""
    return gaps(policy, groups, packed(wanted(), done), 1.0).max().item()


def test_absorbed_decode_is_the_trainers_forward_pass(policy: PolicyModel, one_rank: ParallelGroups) -> None:
    engine = rollout_engine(policy, max_batch_size=6)
    done = generate(policy, engine, wanted())
    assert gap(policy, one_rank, done) < CLOSE
    for keys, values in zip(engine.cache.keys, engine.cache.values, strict=True):
        assert (keys.shape[-1], values.shape[-1]) == (KEY, LATENT["kv_lora_rank"])
        assert values.data_ptr() == keys.data_ptr(), "values are no memory of their own"
    assert len(engine.cache.tensors) == policy.config.num_layers


def test_whole_heads_in_the_cache_say_the_same(policy: PolicyModel, one_rank: ParallelGroups) -> None:
    plain = latent(attention_backend=policy.attention.cache_name, rl_mla_absorb=False, no_rl_mla_absorb=True)
    engine = rollout_engine(plain, max_batch_size=6)
    done = generate(plain, engine, wanted())
    assert gap(plain, one_rank, done) < CLOSE
    heads = LATENT["qk_head_dim"] + LATENT["qk_pos_emb_head_dim"], LATENT["v_head_dim"]
    assert (engine.cache.keys[0].shape[-1], engine.cache.values[0].shape[-1]) == heads
    absorbed = generate(policy, rollout_engine(policy, max_batch_size=6), wanted())
    assert tokens(absorbed) == tokens(done)
    assert largest_gap(absorbed, done) < CLOSE


def test_prompts_that_go_on_from_the_cache(policy: PolicyModel) -> None:
    """Several tokens at a time that attend to latents of others: by prefixes that are reused, and in small parts."""
    whole = generate(policy, rollout_engine(policy, reuse_prefixes=False), wanted())
    engine = rollout_engine(policy, prefill_token_budget=4)
    for _ in range(2):
        again = generate(policy, engine, wanted())
        assert tokens(again) == tokens(whole)
        assert largest_gap(again, whole) < CLOSE


def test_replays_of_a_decode_step_draw_the_same(policy: PolicyModel) -> None:
    eager = generate(policy, rollout_engine(policy), wanted())
    engine = rollout_engine(policy)
    recorder = taped(engine, policy, (4, 8))
    done = generate(policy, engine, wanted())
    assert recorder.replayed == engine.statistics.decode_steps > 0
    assert tokens(done) == tokens(eager)
    assert largest_gap(done, eager) < CLOSE

