"""The trainer sends tokens to the experts it is given, and what that changes: the choice, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.policy import PolicyTrainer, ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Hints
from tests.support.generation import generate, ragged_requests, randomise_vectors, rollout_engine
from tests.support.samples import own_reward, random_samples, rewards_of, with_experts
from tests.support.scoring import gaps, own_experts, packed, rerouted, routing_of
from tests.support.tiny import tiny_config, tiny_policy
from tests.support.tokens import padding_of

MIXTURE = {"add_qkv_bias": False, "qk_layernorm": True, "num_layers": 3, "num_experts": 8, "moe_ffn_hidden_size": 24,
           "moe_router_topk": 3, "rl_router_replay": True}  # fmt: skip
UNKNOWN = torch.iinfo(torch.uint8).max
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def mixture(**changes: object) -> PolicyModel:
    policy = tiny_policy(tiny_config(**MIXTURE | changes))
    randomise_vectors(policy)
    return policy


def random_batch() -> TokenBatch:
    """Five samples, padded, with experts drawn at random; none for the last token of each and for the padding."""
    batch = collate(with_experts(random_samples(5), range(3), 8, 3), "cpu", round_to=8)
    assert padding_of(batch) > 0
    return batch


def logprobs_and_gradients(
    policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    scorer = Scorer(policy, groups, 1.0)
    policy.gpt.train()
    policy.gpt.zero_grad()
    logprobs = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
    (logprobs * torch.linspace(-1, 1, logprobs.numel()) * batch.loss_mask).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def seen_routers(policy: PolicyModel) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """(layer, [T, experts] bool: where its router sends the tokens), in the order of the calls."""
    seen: list[tuple[int, torch.Tensor]] = []
    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(policy.gpt.decoder.layers):
            router = layer.mlp.router
            handle = router.register_forward_hook(lambda _, __, out, index=index: seen.append((index, out[1].clone())))
            hooks.callback(handle.remove)
        yield seen


@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
def test_the_trainers_own_choice_changes_nothing(one_rank: ParallelGroups, pre_softmax: bool, recompute: dict) -> None:
    policy = mixture(moe_router_pre_softmax=pre_softmax, **recompute)
    batch = collate(random_samples(5), "cpu", 8)
    own = own_experts(policy, one_rank, batch)
    plain, expected = logprobs_and_gradients(policy, one_rank, batch)
    replayed, actual = logprobs_and_gradients(policy, one_rank, rerouted(batch, own.to(torch.uint8)))
    # To the bit where top-k is sorted. Without gradients megatron-core 0.19 does not sort: sums in another order.
    torch.testing.assert_close(replayed, plain, rtol=1e-6, atol=1e-6)
    assert any("router" in name for name in expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("recompute", [{}, FULL, {"recompute_granularity": "selective"}],
                         ids=["kept", "recomputed", "selective"])  # fmt: skip
def test_every_layer_gets_its_own(one_rank: ParallelGroups, recompute: dict) -> None:
    """Also when it is recomputed, after other layers' passes; tokens without experts go where the router says."""
    policy, batch = mixture(**recompute), random_batch()
    with seen_routers(policy) as seen:
        _, gradients = logprobs_and_gradients(policy, one_rank, batch)
    assert [layer for layer, _ in seen] == ([0, 1, 2, 2, 1, 0] if recompute is FULL else [0, 1, 2])
    known = routing_of(batch)[0, :, 0] != UNKNOWN
    assert (~known).sum() == len(batch.samples.sample_id) + padding_of(batch)
    for layer, routed in seen:
        wanted = torch.zeros_like(routed).scatter(1, routing_of(batch)[layer].long().clamp_max(7), True)
        assert torch.equal(routed[known], wanted[known])
        assert (routed.sum(-1) == 3).all()
    assert not torch.equal(seen[0][1], seen[1][1])
    if recompute:
        _, expected = logprobs_and_gradients(mixture(), one_rank, batch)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("pre_softmax", "dtype"), [(False, torch.uint8), (True, torch.int16)])
def test_how_much_an_expert_counts_is_the_trainers_own(
    one_rank: ParallelGroups, pre_softmax: bool, dtype: torch.dtype
) -> None:
    """The softmax over the experts given (or over all), written out; the router has its gradient."""
    router = mixture(moe_router_pre_softmax=pre_softmax).gpt.decoder.layers[1].mlp.router
    hidden, draw = torch.randn(5, 1, 32, requires_grad=True), torch.Generator().manual_seed(1)
    experts = torch.rand(5, 8, generator=draw).argsort(-1)[:, :3]
    logits = hidden[:, 0] @ router.weight.t()
    given = experts.to(dtype)
    given[4] = torch.iinfo(dtype).max  # nobody knows: the router chooses
    experts[4] = logits[4].topk(3).indices
    with router.router_replay.replaying(given):
        shares, routed = router(hidden)
    expected = logits.softmax(-1).gather(1, experts) if pre_softmax else logits.gather(1, experts).softmax(-1)
    torch.testing.assert_close(shares.gather(1, experts), expected)
    assert torch.equal(routed, torch.zeros(5, 8, dtype=torch.bool).scatter(1, experts, True))
    weight = torch.rand(5, 3, generator=draw)
    actual = torch.autograd.grad((shares.gather(1, experts) * weight).sum(), (router.weight, hidden), retain_graph=True)
    wanted = torch.autograd.grad((expected * weight).sum(), (router.weight, hidden))
    assert wanted[0].abs().max() > 1e-3
    for own, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(own, other)
    chosen, _ = router(hidden)  # outside, the router chooses again
    assert torch.equal(chosen.topk(3).indices.sort(-1).values, logits.topk(3).indices.sort(-1).values)


def test_quantised_rollouts_come_closer(one_rank: ParallelGroups) -> None:
    """What is left of the gap is the rounding of the linears; experts that were swapped were most of it."""
    policy = mixture(num_experts=16, num_layers=4)
    linears = QuantizedLinears(policy.gpt, RECIPES.get("int8"))
    requests = ragged_requests(12, num_samples=4, max_new_tokens=30)
    requests = [replace(request, hints=Hints(wants_routing=True)) for request in requests]
    engine = rollout_engine(policy, max_batch_size=48, records_routing=True)
    with linears.installed():
        groups = generate(policy, engine, requests)
    batch = packed(requests, groups)
    own, known = own_experts(policy, one_rank, batch).sort(-1).values, routing_of(batch)[0, :, 0] != UNKNOWN
    swapped = (own != routing_of(batch).long().sort(-1).values).any(-1).any(0)[known]
    assert 0.05 < swapped.float().mean() < 0.9
    replayed = gaps(policy, one_rank, batch, 1.0)
    plain = gaps(policy, one_rank, rerouted(batch, None), 1.0)
    assert replayed.mean() < 0.7 * plain.mean()
    assert replayed.max() < 0.7 * plain.max()
    # Those of the next token, or of the next layer, are as good as none.
    for shift in (1, 0):
        wrong = rerouted(batch, routing_of(batch).roll(1, shift))
        assert gaps(policy, one_rank, wrong, 1.0).mean() > 2 * plain.mean()


def test_the_reference_goes_to_the_same_experts(one_rank: ParallelGroups) -> None:
    """Before the first update it is the policy, and the penalty is 0 on whatever experts the rollout was."""
    config = tiny_config(**MIXTURE, grpo_kl_beta=0.1, clip_grad=0.0)
    policy = tiny_policy(config)
    scorer = Scorer(policy, one_rank, 1.0)
    trainer = PolicyTrainer(
        Optimization(policy, config), scorer, own_reward, PolicyObjective.of(config), 1, PhaseTimer(),
        ReferencePolicy(policy),
    )  # fmt: skip
    samples = with_experts(random_samples(5), range(3), 8, 3)
    outcome = trainer.step([[collate(samples, "cpu", 8)]], rewards_of(samples))
    assert outcome.metrics["actor/kl_loss"] == 0
    assert outcome.metrics["actor/grad_norm"] > 0
    (batch,) = outcome.updates[0]
    own = scorer.logprobs([rerouted(batch, None)])[0]
    assert (own - batch.ref_logprobs).abs().max() > 1e-2, "the experts made no difference"
