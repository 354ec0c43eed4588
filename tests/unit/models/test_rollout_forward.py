"""The short way through the model against the stock modules and the training forward: the same bits on a CPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_rl.families import Architecture
from megatron_rl.models.attention.plan import PackedPlan
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.rollout import RolloutForward, RolloutLayer
from megatron_rl.quantization.audit import observe_linears
from tests.support.generation import generate, largest_gap, ragged_requests, randomise_vectors, rollout_engine, tokens
from tests.support.tiny import MIXED, tiny_config, tiny_policy

FAMILIES = {
    "qwen2": {},
    "llama": {"add_qkv_bias": False},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
    "qwen3_moe": {"add_qkv_bias": False, "qk_layernorm": True, "num_experts": 4, "moe_ffn_hidden_size": 24},
    "glm4_moe": MIXED,
    "qwen2_moe": {
        "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True, "moe_router_pre_softmax": True,
    },
    "tied": {"untie_embeddings_and_output_weights": False},
    "multi_head": {"group_query_attention": False, "num_query_groups": False},
    "multi_query": {"num_query_groups": 1},
    "layer_norm": {"normalization": "LayerNorm", "qk_layernorm": True},
    "gelu_with_biases": {"swiglu": False, "disable_bias_linear": False, "add_qkv_bias": False},
    "wide_heads": {"kv_channels": 24},
    "half_rotary": {"rotary_percent": 0.5},
    "odd_feed_forward": {"ffn_hidden_size": 44},
    "padded_vocabulary": {"make_vocab_size_divisible_by": 40},
}


def family(name: str) -> PolicyModel:
    """A tiny model with biases and norm weights that matter."""
    policy = tiny_policy(tiny_config(**FAMILIES[name]))
    randomise_vectors(policy)
    return policy


Passes = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@contextlib.contextmanager
def recorded() -> Iterator[Passes]:
    """Token ids, positions and logits of every forward pass of engines that are made inside."""
    passes: Passes = []
    own = RolloutForward.chunk

    def noted(self: RolloutForward, number: int, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = own(self, number, token_ids, positions)
        passes.append((token_ids.clone(), positions.clone(), logits.clone()))
        return logits

    with mock.patch.object(RolloutForward, "chunk", noted):
        yield passes


def run(policy: PolicyModel, short: bool, **sampling: object):
    """Completions of a ragged batch, and the logits of every forward pass."""
    with (
        mock.patch.object(RolloutForward, "is_local", short),
        mock.patch.object(RolloutLayer, "decode", autospec=True, side_effect=RolloutLayer.decode) as decode,
        recorded() as passes,
    ):
        engine = rollout_engine(policy, max_batch_size=6)
        groups = generate(policy, engine, ragged_requests(7, num_samples=2, max_new_tokens=20, **sampling))
    assert decode.called == short
    return groups, [logits for *_, logits in passes]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_logits_and_tokens_as_the_stock_modules(one_rank: object, name: str) -> None:
    policy = family(name)
    ours, our_logits = run(policy, short=True)
    stock, stock_logits = run(policy, short=False)
    assert tokens(ours) == tokens(stock)
    assert largest_gap(ours, stock) == 0
    assert len(our_logits) == len(stock_logits) > 10
    for one, other in zip(our_logits, stock_logits, strict=True):
        assert torch.equal(one, other)


def test_a_dense_layer_before_experts(one_rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    (of_experts, _) = tiny_config(**FAMILIES["qwen3_moe"]).architecture().kinds
    monkeypatch.setattr(Architecture, "kinds", (replace(of_experts, mlp="dense"), of_experts))
    policy = family("qwen3_moe")
    assert [name for name, _ in policy.named_parameters()] == [one.name for one in policy.layout.parameters]
    ours, our_logits = run(policy, short=True)
    stock, stock_logits = run(policy, short=False)
    assert tokens(ours) == tokens(stock)
    assert all(torch.equal(one, other) for one, other in zip(our_logits, stock_logits, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_same_logits_as_the_training_forward(one_rank: object, name: str) -> None:
    policy = family(name)
    wanted = ragged_requests(5, max_new_tokens=16, greedy=True)
    with recorded() as seen:
        engine = rollout_engine(policy, stop_ids=())  # nobody ends early, so no row moves
        groups = generate(policy, engine, wanted)
    trained = training_logits(policy, [r.prompt_ids + c.token_ids for r, (c,) in zip(wanted, groups, strict=True)])
    assert len(seen) == 16
    for token_ids, positions, logits in seen[1:]:  # the first is the prefill
        for row, (request, (completion,)) in enumerate(zip(wanted, groups, strict=True)):
            place = int(positions[row])
            assert (request.prompt_ids + completion.token_ids)[place] == token_ids[row]
            if policy.config.num_moe_experts is None:
                assert torch.equal(logits[row], trained[row][place])
            else:  # an expert may get fewer rows than keep a product's bits, see decisions/001
                torch.testing.assert_close(logits[row], trained[row][place])


def training_logits(policy: PolicyModel, sequences: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The logits of every token of packed ``sequences``, with gradients on, over the real vocabulary."""
    lengths = [len(sequence) for sequence in sequences]
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    plan = PackedPlan.build(lengths, borders, positions, policy.ropes, policy.dtype, policy.attention.packed)
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    policy.gpt.train()
    logits = policy.gpt(ids[None], positions[None], None, packed_seq_params=plan)
    assert logits.requires_grad
    return list(logits[0, :, : policy.vocab_size].detach().split(lengths))


def test_every_linear_is_still_observed(one_rank: object) -> None:
    """Calibration and audit look at the linears by forward hooks."""
    policy = family("qwen2")
    engine = rollout_engine(policy)
    with observe_linears(policy.gpt, channels=True) as seen:
        generate(policy, engine, ragged_requests(3, max_new_tokens=4))
    assert len(seen) == 4 * policy.config.num_layers
    calls = {observation.calls for observation in seen.values()}
    assert calls == {engine.statistics.decode_steps + 1}
    assert all(observation.channel_amax.min() > 0 for observation in seen.values())


def test_a_replaced_forward_is_called(one_rank: object) -> None:
    """Quantised rollouts put their product on the instance."""
    policy = family("qwen2")
    plain = tokens(generate(policy, rollout_engine(policy), ragged_requests(3, max_new_tokens=12)))
    linear = policy.gpt.decoder.layers[1].mlp.linear_fc2
    own = linear.forward

    def negated(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        product, bias = own(inputs)
        return -product, bias

    linear.forward = negated
    changed = tokens(generate(policy, rollout_engine(policy), ragged_requests(3, max_new_tokens=12)))
    del linear.forward
    assert changed != plain
