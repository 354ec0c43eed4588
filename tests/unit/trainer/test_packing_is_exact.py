"""A packed batch gives what megatron's stock forward pass gives for each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_rl.models import PolicyModel
from megatron_rl.packing.collate import collate
from megatron_rl.parallel import ParallelGroups
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Sample
from tests.support.samples import random_samples
from tests.support.tiny import tiny_config, tiny_policy

TEMPERATURE = 0.8
MODELS = {
    "plain": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "qk_layernorm": {"qk_layernorm": True},
    "layernorm_gelu_biases": {"normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False},
    "half_rotary": {"rotary_percent": 0.5},
    "recompute": {"recompute_granularity": "selective"},
}


def stock_logprobs(policy: PolicyModel, sample: Sample) -> torch.Tensor:
    """[L]: one sequence through stock attention, a plain log-softmax over the real vocabulary."""
    ids = sample.token_ids
    logits = policy.gpt(ids[None], torch.arange(sample.length)[None], None)[0]
    table = (logits[:, : policy.vocab_size].float() / TEMPERATURE).log_softmax(-1)
    return torch.cat((torch.zeros(1), table[:-1].gather(1, ids[1:, None])[:, 0]))


def gradients(policy: PolicyModel, total: torch.Tensor) -> Sequence[torch.Tensor]:
    policy.gpt.zero_grad()
    total.backward()
    return [parameter.grad for parameter in policy.gpt.parameters()]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("round_to", [1, 8])
def test_packed_equals_one_by_one(one_rank: ParallelGroups, model: str, round_to: int) -> None:
    policy = tiny_policy(tiny_config(**MODELS[model]))
    scorer = Scorer(policy, one_rank.tensor_group, TEMPERATURE)
    samples = random_samples(5)
    batch = collate(samples, "cpu", round_to)
    assert (batch.padding > 0) == (round_to == 8)

    packed = scorer.select(scorer.forward(policy.gpt, batch), batch).logprobs
    alone = torch.cat([stock_logprobs(policy, sample) for sample in samples])
    size = alone.numel()
    assert (packed[:size] - alone).abs().max().item() < 1e-6 * alone.abs().max().item()

    weight = torch.linspace(-1, 1, size) * batch.loss_mask[:size]
    expected = gradients(policy, (alone * weight).sum())
    actual = gradients(policy, (packed[:size] * weight).sum())
    for name, own, other in zip(dict(policy.gpt.named_parameters()), actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-5, msg=name)
    assert any(gradient.abs().max() > 0.1 for gradient in expected)


def test_scoring_leaves_no_graph_behind(one_rank: ParallelGroups) -> None:
    policy = tiny_policy()
    batch = collate(random_samples(2), "cpu")
    assert not Scorer(policy, one_rank.tensor_group, 1.0).logprobs(batch).requires_grad
