"""Two micro-batches are one: the gradient of an update does not depend on how its samples are packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.objective import MicroLoss, PolicyObjective, objective_metrics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.registry import LOSSES
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import reduce_sums, update
from tests.support.samples import gradients_of, make_sample, own_reward, random_samples, rewards_of, tiny_optimization
from tests.support.tokens import correction

AGGREGATIONS = ["token-mean", "sequence-mean", "constant"]
LAYOUTS = {
    "one each": [[0], [1], [2], [3], [4]],
    "two": [[0, 3], [1, 2, 4]],
    "shuffled": [[4, 1], [2], [3, 0]],
}


def objective(aggregation: str, loss: str = "clip") -> PolicyObjective:
    return PolicyObjective(
        loss=LOSSES.get(loss)(**({} if loss == "sapo" else {"clamp_eps_lower": 0.2, "clamp_eps_upper": 0.28})),
        correction=correction("token_tis", cap=2.0),
        aggregation=aggregation,
        aggregation_constant=7.0,
        kl_beta=0.1,
        kl_estimator="k3",
        entropy_weight=0.05,
    )


def scored(samples: Sequence[Sample], everything: Sequence[Sample], shift: float = 0.1) -> TokenBatch:
    """Old and reference log-probs that differ from the model's, token by token."""
    batch = replace(collate(samples, "cpu"), step=rewards_of(everything))
    wave = torch.sin(batch.samples.token_ids + batch.packing.position_ids.float())
    known = {"old_logprobs": -3.4 + shift * wave, "ref_logprobs": -3.6 - shift * wave}
    return replace(batch, advantages=own_reward(batch)[0], **known)


def loss_of(scorer: Scorer, own: PolicyObjective) -> Callable[[torch.Tensor, TokenBatch], MicroLoss]:
    def loss(output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        return own(scorer.select(output, batch, "differentiable"))

    return loss


def updated(
    one_rank: ParallelGroups, layout: Sequence[Sequence[int]], own: PolicyObjective
) -> tuple[dict[str, torch.Tensor], dict[str, float], float]:
    """Gradients, metrics and the gradient norm of one update."""
    optimization = tiny_optimization()
    scorer = Scorer(optimization.policy, one_rank, 1.0)
    samples = random_samples(5)
    batches = [scored([samples[index] for index in members], samples) for members in layout]
    outcome, sums = update(optimization, batches, scorer.forward, loss_of(scorer, own))
    metrics = objective_metrics(reduce_sums(sums, one_rank.data_group, optimization.policy.device))
    return gradients_of(optimization), metrics, outcome.grad_norm


@pytest.mark.each_value
@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_layout_does_not_matter(one_rank: ParallelGroups, aggregation: str, loss: str) -> None:
    expected, metrics, norm = updated(one_rank, [[0, 1, 2, 3, 4]], objective(aggregation, loss))
    assert norm > 1e-3
    for layout in LAYOUTS.values():
        actual, own_metrics, own_norm = updated(one_rank, layout, objective(aggregation, loss))
        assert own_norm == pytest.approx(norm, rel=1e-5)
        assert own_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_the_whole_batch_divided_once(one_rank: ParallelGroups, aggregation: str) -> None:
    """Against autograd on ``total / denominator``, without megatron's schedule."""
    actual, _, _ = updated(one_rank, LAYOUTS["two"], objective(aggregation))
    policy = tiny_optimization().policy
    scorer = Scorer(policy, one_rank, 1.0)
    whole = scored(random_samples(5), random_samples(5))
    total, denominator, _ = loss_of(scorer, objective(aggregation))(scorer.forward(policy.gpt, whole), whole)
    parameters = dict(policy.gpt.named_parameters())
    for parameter in parameters.values():
        parameter.main_grad.zero_()
    (total / denominator).backward()  # the wrapper's hooks add it to main_grad
    for name, parameter in parameters.items():
        torch.testing.assert_close(actual[name], parameter.main_grad, rtol=1e-4, atol=1e-6, msg=name)


def test_clipping_scales_the_gradient_to_the_limit(one_rank: ParallelGroups) -> None:
    norm, left = sum_of_squares(one_rank, tiny_optimization())
    assert left == pytest.approx(norm, rel=1e-5)
    for share, expected in ((0.01, 0.01), (0.9, 0.9), (1.1, 1.0)):
        reported, left = sum_of_squares(one_rank, tiny_optimization(clip_grad=share * norm))
        assert reported == pytest.approx(norm), "before clipping"
        assert left == pytest.approx(expected * norm, rel=1e-3)


def sum_of_squares(one_rank: ParallelGroups, optimization: Optimization) -> tuple[float, float]:
    """The norm an update reports and the norm of the gradients it leaves."""
    scorer = Scorer(optimization.policy, one_rank, 1.0)
    samples = [make_sample([1, 2, 3])]
    loss = loss_of(scorer, objective("token-mean"))
    outcome, _ = update(optimization, [scored(samples, samples)], scorer.forward, loss)
    left = torch.cat([gradient.flatten() for gradient in gradients_of(optimization).values()])
    return outcome.grad_norm, left.norm().item()
