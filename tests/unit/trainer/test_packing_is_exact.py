"""A packed batch gives what megatron's stock forward pass gives for each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_rl.algorithms.batch import Sample
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.samples import random_samples
from tests.support.tiny import tiny_config, tiny_policy
from tests.support.tokens import padding_of

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
    scorer = Scorer(policy, one_rank, TEMPERATURE)
    samples = random_samples(5)
    batch = collate(samples, "cpu", round_to)
    assert (padding_of(batch) > 0) == (round_to == 8)

    packed = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
    alone = torch.cat([stock_logprobs(policy, sample) for sample in samples])
    size = alone.numel()
    assert (packed[:size] - alone).abs().max().item() < 1e-6 * alone.abs().max().item()

    weight = torch.linspace(-1, 1, size) * batch.loss_mask[:size]
    expected = gradients(policy, (alone * weight).sum())
    actual = gradients(policy, (packed[:size] * weight).sum())
    for name, own, other in zip(dict(policy.gpt.named_parameters()), actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-5, msg=name)
    assert any(gradient.abs().max() > 0.1 for gradient in expected)


@pytest.mark.parametrize("model", ["plain", "tied"])
def test_the_fused_output_layer_gives_the_same(one_rank: ParallelGroups, model: str) -> None:
    policy = tiny_policy(tiny_config(**MODELS[model]))
    batch = collate(random_samples(5), "cpu", 8)
    results = []
    for fused in (False, True):
        scorer = Scorer(policy, one_rank, TEMPERATURE, fused)
        output = scorer.forward(policy.gpt, batch)
        assert output.shape[1] == (policy.config.hidden_size if fused else policy.padded_vocab_size)
        selected = scorer.select(output, batch, "differentiable")
        weight = torch.linspace(-1, 1, selected.current_logprobs.numel())
        total = ((selected.current_logprobs + 0.1 * selected.entropy) * weight).sum()
        results.append((selected, gradients(policy, total)))
        assert torch.equal(scorer.logprobs([batch])[0], selected.current_logprobs)
        ((logprobs, top),) = scorer.logprobs_and_top([batch])  # needs logits, whichever way select takes
        assert top.max() < policy.vocab_size
        torch.testing.assert_close(logprobs, selected.current_logprobs, rtol=1e-6, atol=1e-6)
    (whole, expected), (fused, actual) = results
    torch.testing.assert_close(fused.current_logprobs, whole.current_logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fused.entropy, whole.entropy, rtol=1e-6, atol=1e-6)
    for name, own, other in zip(dict(policy.gpt.named_parameters()), actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6, msg=name)
    assert "forward" not in vars(policy.gpt.output_layer), "the layer still hands on its input"


def test_scoring_leaves_no_graph_behind(one_rank: ParallelGroups) -> None:
    policy = tiny_policy()
    batch = collate(random_samples(2), "cpu")
    assert not Scorer(policy, one_rank, 1.0).logprobs([batch])[0].requires_grad
