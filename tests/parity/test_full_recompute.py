"""Greedy decoding with a cache against the plain forward pass over the whole sequence, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_rl.models import PolicyModel, rollout_mode
from tests.support.generation import END, generate, ragged_requests, randomise_vectors, rollout_engine
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy


@torch.no_grad()
def greedy_without_cache(policy: PolicyModel, prompt: Sequence[int], max_new: int) -> tuple[int, ...]:
    """megatron's own training forward and attention core, once per token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_new and (len(ids) == len(prompt) or ids[-1] != END):
        length = len(ids)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logits = policy.gpt(torch.tensor([ids]), torch.arange(length)[None], future)
        ids.append(int(logits[0, -1, :VOCABULARY].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize(
    "architecture",
    [{}, {"add_qkv_bias": False, "qk_layernorm": True}, {"untie_embeddings_and_output_weights": False}],
    ids=["qwen2", "qwen3", "tied"],
)
def test_the_cache_changes_nothing(one_rank: object, architecture: dict[str, object]) -> None:
    policy = tiny_policy(tiny_config(**architecture))
    randomise_vectors(policy)
    requests = ragged_requests(7, greedy=True, max_new_tokens=20)
    # Three slots: refills and compaction are on the way.
    groups = generate(policy, rollout_engine(policy, max_batch_size=3, steps_per_host_read=3), requests)

    with rollout_mode(policy):
        expected = [greedy_without_cache(policy, r.prompt_ids, r.sampling.max_new_tokens) for r in requests]
    assert [group[0].token_ids for group in groups] == expected
    assert len({ids for ids in expected}) > 3, "the model says the same to every prompt"
