"""Our engine against megatron-core's on the same model: same tokens, same log-probs."""

from __future__ import annotations

import pytest

from tests.support.generation import (
    END,
    generate,
    largest_gap,
    mcore_engine,
    ragged_requests,
    randomise_vectors,
    rollout_engine,
    tokens,
)
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
    "tied": {"untie_embeddings_and_output_weights": False},
    "multi_head": {"group_query_attention": False, "num_query_groups": False},
    "multi_query": {"num_query_groups": 1},
    "layer_norm": {"normalization": "LayerNorm"},
    "layer_norm_of_heads": {"normalization": "LayerNorm", "qk_layernorm": True},
    "gelu_with_biases": {"swiglu": False, "disable_bias_linear": False, "add_qkv_bias": False},
    "wide_heads": {"kv_channels": 16},
    "half_rotary": {"rotary_percent": 0.5},
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 24},
    "experts_of_all": {"num_experts": 6, "moe_router_topk": 3, "moe_router_pre_softmax": True},
    "padded_vocabulary": {"make_vocab_size_divisible_by": 40},
}
LENGTH = 96
"""Longer than a page of the stock engine's KV buffer, so that sequences cross a page border."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_and_their_logprobs_agree(one_rank: object, architecture: str) -> None:
    config = tiny_config(seq_length=LENGTH, **ARCHITECTURES[architecture])
    policy = tiny_policy(config)
    randomise_vectors(policy)
    requests = ragged_requests(10, longest_prompt=40, greedy=True, max_new_tokens=50)

    ours = generate(policy, rollout_engine(policy, max_sequence_length=LENGTH), requests)
    stock = generate(policy, mcore_engine(policy, max_sequence_length=LENGTH), requests)

    assert tokens(ours) == tokens(stock)
    assert [c.finish_reason for g in ours for c in g] == [c.finish_reason for g in stock for c in g]
    assert largest_gap(ours, stock) < 1e-5
    assert any(len(ids) > 1 for ids in tokens(ours)), "nothing was decoded after the prefill"


def test_both_finish_reasons_occur(one_rank: object) -> None:
    """Otherwise the comparison of finish reasons above would compare nothing."""
    policy = tiny_policy(tiny_config(seq_length=LENGTH))
    requests = ragged_requests(10, longest_prompt=40, greedy=True, max_new_tokens=50)
    completions = [group[0] for group in generate(policy, mcore_engine(policy, max_sequence_length=LENGTH), requests)]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop")
        assert END not in completion.token_ids[:-1]


def test_several_end_tokens_agree(one_rank: object) -> None:
    policy = tiny_policy()
    requests = ragged_requests(8, greedy=True, max_new_tokens=30)
    ends = (END, 11, 20)
    ours = generate(policy, rollout_engine(policy, ends), requests)
    stock = generate(policy, mcore_engine(policy, ends), requests)
    assert tokens(ours) == tokens(stock)
    stopped = {c.token_ids[-1] for g in stock for c in g if c.finish_reason == "stop"}
    assert len(stopped) > 1, "only one of the end tokens was ever drawn"


@pytest.mark.parametrize("make_engine", [rollout_engine, mcore_engine])
def test_padding_of_the_vocabulary_is_never_drawn(one_rank: object, make_engine) -> None:
    policy = tiny_policy(tiny_config(make_vocab_size_divisible_by=40))
    padding = policy.gpt.output_layer.weight.data[VOCABULARY:]
    assert padding.shape[0] == 8
    # Opposite rows: whatever the hidden state, one of each pair has by far the largest logit.
    padding[:4] = 20 * padding[:4].sign()
    padding[4:] = -padding[:4]
    for greedy in (True, False):
        requests = ragged_requests(4, num_samples=4, greedy=greedy, max_new_tokens=20)
        groups = generate(policy, make_engine(policy), requests)
        assert max(token for ids in tokens(groups) for token in ids) < VOCABULARY
        # A denominator that counted the padding would push all of them below about -20.
        assert min(c.inference_logprobs[0] for g in groups for c in g) > -15
