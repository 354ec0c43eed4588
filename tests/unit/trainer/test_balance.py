"""Losses of the routers: numbers by hand, and that neither micro-batches nor padding change what they weigh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.routing import BalanceLosses
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.weights import first_critic
from megatron_rl.trainer.critic import Critic, ValueScorer
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate, without_loss
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import update
from tests.support.samples import gradients_of, make_sample, random_samples
from tests.support.tiny import MIXED, tiny_config, tiny_policy
from tests.support.tokens import changed

SEQUENCES = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5}
BATCHES = SEQUENCES | {"moe_router_load_balancing_type": "aux_loss"}
Z = {"moe_z_loss_coeff": 0.25}
MIXTURE = {
    "num_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 24,
    "add_qkv_bias": False, "num_layers": 1, "clip_grad": 0.0,
}  # fmt: skip
LARGER = {"num_layers": 2, "num_experts": 4, "moe_router_topk": 2, "moe_router_pre_softmax": False}
LOG3 = torch.tensor(3.0).log().item()
"""Logits (LOG3, 0) are probabilities 3/4 and 1/4."""


def one_pass(
    batch: TokenBatch, logits: torch.Tensor, scores: str = "softmax", **flags: object
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """The loss of a router that sends tokens where its logits say, its gradient, and metrics."""
    losses = BalanceLosses(tiny_config(**MIXTURE | flags), torch.device("cpu"))
    logits = logits.clone().requires_grad_()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.argmax(1, keepdim=True), True)
    loss = losses.new_pass(batch, None).loss(1, logits, chosen, torch.distributed.group.WORLD, scores)
    loss.backward()
    return loss.item(), logits.grad, losses.metrics()


@pytest.fixture
def batch() -> TokenBatch:
    """Two sequences of 4 and 2 tokens, of which 3 and 1 are in the loss, and 2 tokens of padding."""
    return collate([make_sample([1, 2, 3, 4]), make_sample([5, 6], sample_id=1)], "cpu", round_to=8)


LOGITS = torch.tensor([[LOG3, 0.0]] * 3 + [[0.0, LOG3]] + [[LOG3, 0.0], [0.0, LOG3]] + [[LOG3, 0.0]] * 2)
"""Of the first sequence three tokens go to expert 0 and one to expert 1; of the second one each."""


def test_by_sequence(one_rank: ParallelGroups, batch: TokenBatch) -> None:
    """First: shares 3/4 and 1/4, mean probabilities (3 x 3/4 + 1/4) / 4 = 5/8 and 3/8: 2 x (15/32 + 3/32) = 9/8.
    Second: 1/2 each: 1. Weighed by their loss tokens, 3 and 1: 4.375, and divided by them 1.09375.
    """
    loss, gradient, metrics = one_pass(batch, LOGITS, **SEQUENCES)
    assert loss == pytest.approx(0.5 * (3 * 9 / 8 + 1 * 1))
    assert metrics["actor/load_balancing_loss"] == pytest.approx(4.375 / 4)
    assert metrics["actor/expert_load_max"] == pytest.approx(4 / 3)  # of 6 tokens four go to one of two experts
    # d / d logit 0 of a token of the first: coefficient 0.5, weight 3, 2 experts, a quarter of the mean, p0 p1 = 3/16,
    # and the difference of the shares, 1/2.
    assert gradient[0].tolist() == pytest.approx([0.5 * 3 * 2 / 4 * 3 / 16 / 2, -0.5 * 3 * 2 / 4 * 3 / 16 / 2])
    assert gradient[4:].abs().max() < 1e-7  # balanced, and padding


def test_of_sigmoids(one_rank: ParallelGroups, batch: TokenBatch) -> None:
    """Sigmoids 3/4 and 1/2 are shares of 0.6 and 0.4, whose means in the first are 0.55 and 0.45:
    2 x (3/4 x 0.55 + 1/4 x 0.45) = 1.05.
    """
    loss, gradient, metrics = one_pass(batch, LOGITS, "sigmoid", **SEQUENCES)
    assert loss == pytest.approx(0.5 * (3 * 1.05 + 1 * 1))
    assert metrics["actor/load_balancing_loss"] == pytest.approx((3 * 1.05 + 1) / 4)
    # d share 0 / d logit 0 = 3/4 x 1/4 x 1/2 / (5/4)^2 = 0.06; the rest as above.
    assert gradient[0, 0].item() == pytest.approx(0.5 * 3 * 2 / 4 * 0.06 / 2)


def test_by_micro_batch(one_rank: ParallelGroups, batch: TokenBatch) -> None:
    """Shares 4/6 and 2/6, mean probabilities (4 x 3/4 + 2/4) / 6 = 7/12 and 5/12: 2 x (28 + 10) / 72 = 19/18."""
    loss, gradient, metrics = one_pass(batch, LOGITS, **BATCHES)
    assert metrics["actor/load_balancing_loss"] == pytest.approx(19 / 18)
    assert loss == pytest.approx(0.5 * 4 * 19 / 18)
    assert gradient[:6, 0].tolist() == pytest.approx([0.5 * 4 * 2 / 6 * 3 / 16 / 3] * 6)
    assert gradient[6:].abs().max() == 0


def test_a_sequence_counts_once_where_the_loss_counts_sequences(one_rank: ParallelGroups, batch: TokenBatch) -> None:
    _, _, metrics = one_pass(batch, LOGITS, **SEQUENCES, rl_loss_aggregation="sequence-mean")
    assert metrics["actor/load_balancing_loss"] == pytest.approx((9 / 8 + 1) / 2)
    loss, _, metrics = one_pass(batch, LOGITS, **SEQUENCES, rl_loss_aggregation="constant")
    assert loss == pytest.approx(0.5 * (9 / 8 + 1))


def test_z_loss(one_rank: ParallelGroups, batch: TokenBatch) -> None:
    """The log of 3 + 1 everywhere; the gradient is 2 log 4 x probability."""
    log = torch.tensor(4.0).log().item()
    loss, gradient, metrics = one_pass(batch, LOGITS, **Z)
    assert metrics["actor/router_z_loss"] == pytest.approx(log**2)
    assert "actor/load_balancing_loss" not in metrics
    assert loss == pytest.approx(0.25 * 4 * log**2)
    assert gradient[0].tolist() == pytest.approx([0.25 * 3 / 4 * 2 * log * 3 / 4, 0.25 * 3 / 4 * 2 * log / 4])


def test_without_loss_nothing_is_counted(one_rank: ParallelGroups, batch: TokenBatch) -> None:
    loss, gradient, metrics = one_pass(without_loss(batch), LOGITS, **BATCHES, **Z)
    assert loss == 0
    assert gradient.abs().max() == 0
    assert set(metrics.values()) == {0.0}


def trained(
    one_rank: ParallelGroups, bins: list[list[int]], count: int = 12, **flags: object
) -> tuple[dict, dict[str, float]]:
    """Gradients of one update over ``count`` samples, laid into micro-batches as ``bins`` say, and metrics."""
    config = tiny_config(**MIXTURE | LARGER | flags)
    policy = tiny_policy(config)
    optimization = Optimization(policy, config)
    scorer = Scorer(policy, one_rank, 1.0, balance=BalanceLosses.of(config, policy.device))
    samples = random_samples(count)

    def loss(output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        logprobs = scorer.select(output, batch).current_logprobs
        total = -(logprobs * batch.loss_mask).sum()
        return total, batch.loss_mask.sum(), {"loss": total.detach()}

    batches = [collate([samples[i] for i in members], "cpu", 8) for members in bins]
    update(optimization, batches, scorer.forward, loss)
    return gradients_of(optimization), scorer.balance_metrics()


ALONE = [[index] for index in range(12)]


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full", "recompute_method": "uniform",
                                            "recompute_num_layers": 1}], ids=["kept", "recomputed"])  # fmt: skip
def test_micro_batches_change_nothing(one_rank: ParallelGroups, recompute: dict) -> None:
    gradients, metrics = trained(one_rank, ALONE, **SEQUENCES, **Z)
    plain, _ = trained(one_rank, ALONE)
    together, others = trained(one_rank, [[*range(5)], [*range(5, 12)]], **SEQUENCES, **Z, **recompute)
    by_batch, _ = trained(one_rank, ALONE, **BATCHES, **Z)  # of one sequence each
    router = next(name for name in gradients if "layers.0.mlp.router" in name)
    assert (gradients[router] - plain[router]).abs().max() > 0.1 * plain[router].abs().max()
    for name, gradient in gradients.items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(by_batch[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert metrics == pytest.approx(others, rel=1e-5)


def test_what_is_added_is_the_gradient_of_the_weighed_mean(one_rank: ParallelGroups) -> None:
    """Against autograd through routers called by hand on what they were called with."""
    coefficient = SEQUENCES["moe_aux_loss_coeff"]
    gradients, metrics = trained(one_rank, ALONE, **SEQUENCES)
    plain, _ = trained(one_rank, ALONE)
    router = next(name for name in gradients if "layers.1.mlp.router" in name)
    added, weight, total = torch.zeros_like(plain[router]), 0.0, 0.0
    policy = untrained()
    for sample in random_samples(12):
        batch = collate([sample], "cpu")
        for layer in policy.gpt.decoder.layers:
            states: list[torch.Tensor] = []
            handle = layer.mlp.router.register_forward_hook(lambda _, given, __, s=states: s.append(given[0].detach()))
            with torch.no_grad():
                Scorer(policy, one_rank, 1.0).logprobs([batch])
            handle.remove()
            probabilities = (states[0][:, 0] @ layer.mlp.router.weight.t()).softmax(-1)
            share = torch.zeros(4).index_add(0, probabilities.topk(2).indices.flatten(), torch.ones(2 * sample.length))
            loss = 4 * (share / share.sum() * probabilities.mean(0)).sum()
            own = batch.loss_mask.sum().item()
            total += own * loss.item() / 2
            if layer is policy.gpt.decoder.layers[1]:
                added += coefficient * own * torch.autograd.grad(loss, layer.mlp.router.weight)[0]
                weight += own
    torch.testing.assert_close(gradients[router] - plain[router], added / weight, rtol=1e-3, atol=1e-6)
    assert metrics["actor/load_balancing_loss"] == pytest.approx(total / weight, rel=1e-5)


def untrained() -> PolicyModel:
    config = tiny_config(**MIXTURE | LARGER)
    return tiny_policy(config)


def test_a_critics_routers_are_weighed_by_its_loss_tokens(one_rank: ParallelGroups) -> None:
    """As those of a policy whose loss counts tokens, whatever the policy's counts."""
    flags = MIXTURE | LARGER | {"rl_advantage": "gae", "rl_loss_aggregation": "sequence-mean"}
    (batch,) = [collate(random_samples(5), "cpu", 8)]
    scored = changed(batch, values=torch.zeros_like(batch.rewards), returns=torch.ones_like(batch.rewards))
    gradients, metrics = [], []
    for balanced in ({}, SEQUENCES):
        config = tiny_config(**flags | balanced)
        critic = first_critic(config, tiny_policy(config), one_rank)
        losses = BalanceLosses.of(config, critic.policy.device, of_critic=True)
        scorer = ValueScorer(critic.policy, one_rank, balance=losses)
        metrics.append(Critic(critic, scorer, 0.5).update([[scored]])[0])
        gradients.append(gradients_of(critic))
    # The head is zero, so that the value loss itself has nothing to say to the routers.
    of_policy, other = trained(one_rank, [[*range(5)]], 5, **SEQUENCES)
    plain, _ = trained(one_rank, [[*range(5)]], 5)
    for name in (name for name in of_policy if "router" in name):
        assert gradients[0][name].abs().max() == 0
        torch.testing.assert_close(gradients[1][name], of_policy[name] - plain[name], rtol=1e-3, atol=1e-6, msg=name)
    assert metrics[1]["critic/load_balancing_loss"] == pytest.approx(other["actor/load_balancing_loss"], rel=1e-5)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_no_update_moves_a_routers_bias(one_rank: ParallelGroups, precision: dict[str, bool]) -> None:
    """megatron-core would move it by 0.001 for each busy or idle expert; in bf16 it stays fp32."""
    config = tiny_config(**MIXED | precision)
    optimization = Optimization(tiny_policy(config), config)
    routers = [layer.mlp.router for layer in optimization.policy.layers if layer.is_moe_layer]
    given = torch.linspace(-0.3, 0.3, config.model.num_experts)
    for router in routers:
        router.expert_bias.data.copy_(given)
    before = routers[0].weight.detach().clone()
    scorer = Scorer(optimization.policy, one_rank, 1.0)

    def loss(logits: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        return -scorer.select(logits, batch).current_logprobs.sum(), batch.loss_mask.sum(), {}

    update(optimization, [collate(random_samples(3), "cpu")], scorer.forward, loss)
    assert not torch.equal(routers[0].weight, before)
    assert len(routers) == 2
    assert all(router.expert_bias.dtype == torch.float32 for router in routers)
    assert all(torch.equal(router.expert_bias, given) for router in routers)


def test_scoring_is_not_counted(one_rank: ParallelGroups) -> None:
    config = tiny_config(**MIXTURE | SEQUENCES)
    policy = tiny_policy(config)
    scorer = Scorer(policy, one_rank, 1.0, balance=BalanceLosses.of(config, policy.device))
    batch = collate(random_samples(3), "cpu")
    scorer.logprobs([batch, replace(batch)])
    assert scorer.balance_metrics()["actor/expert_load_max"] == 0.0
    assert BalanceLosses.of(tiny_config(), policy.device) is None


@pytest.mark.parametrize(("kind", "weights"), [("sequence-mean", [2 / 3, 1 / 3, 1.0]), ("token-mean", [2.0, 1.0, 1.0])])
def test_of_several_sequences_of_a_sample_each_has_its_share(
    one_rank: ParallelGroups, kind: str, weights: list[float]
) -> None:
    """As in the policy loss: 2 and 1 of a sample's three loss tokens, and a sample of one."""
    first, second = make_sample([1, 2, 3]), make_sample([1, 4])
    branched = [replace(first, tokens_elsewhere=1), replace(second, sequence=1, tokens_elsewhere=2)]
    batch = collate([*branched, make_sample([5, 6], sample_id=1)], "cpu")
    losses = BalanceLosses(tiny_config(**MIXTURE | SEQUENCES | {"rl_loss_aggregation": kind}), torch.device("cpu"))
    torch.testing.assert_close(losses.new_pass(batch, None).weights, torch.tensor(weights))
