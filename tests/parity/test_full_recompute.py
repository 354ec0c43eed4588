"""Decoding with a cache against the plain forward pass over the whole sequence, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_rl.arithmetic import uniform
from megatron_rl.inference.sampler import sample_seed
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.trainer.scoring import Scorer
from tests.support.generation import END, generate, ragged_requests, randomise_vectors, rollout_engine
from tests.support.scoring import packed
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
    groups = generate(policy, rollout_engine(policy, max_batch_size=3, decode_steps_per_sync=3), requests)

    with rollout_mode(policy):
        expected = [greedy_without_cache(policy, r.prompt_ids, r.sampling.max_new_tokens) for r in requests]
    assert [group[0].token_ids for group in groups] == expected
    assert len({ids for ids in expected}) > 3, "the model says the same to every prompt"


def test_a_draw_is_the_inverse_distribution_at_seed_and_position(one_rank) -> None:
    """Every sampled token follows from its sample's seed, its position and the trainer's logits alone."""
    policy = tiny_policy()
    (wanted,) = ragged_requests(1, num_samples=6, temperature=1.3, max_new_tokens=20)
    (group,) = generate(policy, rollout_engine(policy), [wanted], seed=77)
    scorer = Scorer(policy, one_rank, 1.0)
    source = wanted.source
    for index, completion in enumerate(group):
        batch = packed([wanted], [[completion]])
        before = slice(len(wanted.prompt_ids) - 1, len(wanted.prompt_ids) - 1 + len(completion.token_ids))
        with torch.no_grad():
            logits = scorer.forward(policy.gpt, batch)[before, :VOCABULARY]
        position = torch.arange(before.start + 1, before.stop + 1)
        seed = sample_seed(77, source.environment, source.task.id, source.epoch, index)
        cumulative = (logits / 1.3).softmax(-1).cumsum(-1)
        number = uniform(torch.full_like(position, seed), position)
        assert (cumulative < number[:, None]).sum(-1).tolist() == list(completion.token_ids)
