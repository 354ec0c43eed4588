"""What `megatron-rl replay` says of each token, against numbers worked out by hand and from the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.cli.replay_step import Replayed, WatchedScorer, hidden_gradient_norms
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.samples import own_reward, random_samples, rewards_of, tiny_optimization
from tests.unit.trainer.test_policy_loss import PLAIN


def test_the_norm_by_hand() -> None:
    """Two tokens, weights I and hidden states 0, so both have probability 1/2: the logits of a loss of -log p of token
    0 have the gradient (-1/2, 1/2), and the hidden state has the same. A loss three times as large pulls three times.
    """
    layer = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(layer.weight)
    hidden = torch.zeros(3, 1, 2, requires_grad=True)
    with hidden_gradient_norms(layer) as norms:
        log_probs = layer(hidden).log_softmax(-1)
        (-log_probs[0, 0, 0] - 3 * log_probs[2, 0, 1]).backward()
    [found] = norms
    assert found.tolist() == pytest.approx([0.5**0.5, 0.0, 3 * 0.5**0.5])
    layer(torch.zeros(3, 1, 2, requires_grad=True)).sum().backward()
    assert len(norms) == 1, "the layer is left as it was"


@pytest.mark.parametrize("fused", [False, True])
def test_each_token_has_the_gradient_of_its_own_loss(one_rank: ParallelGroups, fused: bool) -> None:
    """d loss / d hidden = slope / temperature x W^T (one-hot - p), and the slope on-policy -advantage / denominator."""
    temperature, chosen = 2.0, 1
    optimization = tiny_optimization()
    scorer = Scorer(optimization.policy, one_rank, temperature, fused)
    samples = random_samples(3)
    batch = replace(collate(samples, "cpu", round_to=8), step=rewards_of(samples))
    batch = replace(batch, advantages=own_reward(batch)[0])
    found = Replayed()
    WatchedScorer(scorer, PLAIN, frozenset({chosen}), found).look(optimization, [batch])

    layer, hidden = optimization.policy.gpt.output_layer, []
    handle = layer.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].detach()[:, 0]))
    scorer.logprobs([batch])
    handle.remove()
    weight = layer.weight.detach()[: optimization.policy.vocab_size]
    own = samples[chosen]
    at = [place for place in range(own.length) if own.loss_mask[place]]
    begin = samples[0].length
    assert [one.token for one in found.tokens] == own.token_ids[at].tolist()
    assert found.denominator == sum(int(sample.loss_mask.sum()) for sample in samples)
    for one, place in zip(found.tokens, at, strict=True):
        assert (one.sample, one.sequence) == (chosen, 0)
        assert one.slope == pytest.approx(-own.reward / found.denominator, rel=1e-5)
        p = (weight @ hidden[0][begin + place - 1] / temperature).softmax(0)
        p[one.token] -= 1
        assert one.gradient == pytest.approx(abs(one.slope) / temperature * float((weight.T @ p).norm()), rel=1e-4)
