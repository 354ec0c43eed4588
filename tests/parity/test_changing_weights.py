"""Training and rollouts take turns on one model: no stale weights, nothing that blocks the backward pass."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.trainer.scoring import Scorer
from tests.support.generation import (
    generate,
    largest_gap,
    mcore_engine,
    ragged_requests,
    rollout_engine,
    tokens,
)
from tests.support.scoring import gaps, packed
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

ENGINES = pytest.mark.parametrize("make_engine", [rollout_engine, mcore_engine])
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@ENGINES
def test_an_in_place_update_is_used_at_once(one_rank: object, make_engine) -> None:
    policy = tiny_policy()
    engine = make_engine(policy)
    requests = ragged_requests(6, greedy=True, max_new_tokens=16)
    before = generate(policy, engine, requests)
    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter.mul_(1.1).add_(0.02)
    after = generate(policy, engine, requests)

    assert tokens(after) != tokens(before)
    fresh = generate(policy, make_engine(policy), requests)
    assert tokens(after) == tokens(fresh)
    assert largest_gap(after, fresh) == 0.0


@ENGINES
@pytest.mark.parametrize(
    "recompute",
    [{}, {"recompute_granularity": "selective"}, FULL_RECOMPUTE],
    ids=["stored", "selective", "full"],
)
def test_rollouts_and_updates_take_turns(one_rank, make_engine, recompute: dict[str, object]) -> None:
    """The rollout comes first, so that every cache of the model is born inside inference mode."""
    policy = tiny_policy(tiny_config(**recompute))
    engine = make_engine(policy)
    optimizer = torch.optim.SGD(policy.gpt.parameters(), lr=1.0)
    requests = ragged_requests(4, num_samples=2, max_new_tokens=12)
    said: list[list[tuple[int, ...]]] = []
    for cycle in range(3):
        groups = generate(policy, engine, requests, seed=7, version=cycle)
        assert {c.policy_version for g in groups for c in g} == {cycle}
        batch = packed(requests, groups)
        assert gaps(policy, one_rank, batch, 1.0).max() < 1e-5
        said.append(tokens(groups))
        _update(policy, one_rank, optimizer, batch)
    assert said[0] != said[1] != said[2], "the updates did not reach the rollouts"


@ENGINES
def test_megatrons_own_forward_stays_trainable(one_rank: object, make_engine) -> None:
    """megatron caches its rotary embedding by length, and full recomputation saves it for the backward pass."""
    policy = tiny_policy(tiny_config(**FULL_RECOMPUTE))
    length = 48  # the engine's maximum, so that the cached entry is the one training asks for
    generate(policy, make_engine(policy), ragged_requests(2, max_new_tokens=4))
    future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = policy.gpt(torch.arange(length)[None] % VOCABULARY, torch.arange(length)[None], future)
    logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in policy.gpt.parameters())


def _update(policy: PolicyModel, one_rank, optimizer: torch.optim.Optimizer, batch) -> None:
    scorer = Scorer(policy, one_rank, 1.0)
    logprobs = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
    (-(logprobs * batch.loss_mask).sum() / batch.loss_mask.sum()).backward()
    assert all(parameter.grad is not None for parameter in policy.gpt.parameters())
    optimizer.step()
    optimizer.zero_grad()
