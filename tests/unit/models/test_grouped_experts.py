"""Stacked experts are the single ones: the same numbers in and out, the same gradients, the same files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.rollout_ops import RolloutOps
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.generation import generate, ragged_requests, rollout_engine
from tests.support.samples import random_samples
from tests.support.tiny import SHAPES, tiny_config, tiny_policy


@pytest.fixture(params=[False, True], ids=["fp32", "bf16"])
def pair(request: pytest.FixtureRequest, one_rank: ParallelGroups) -> tuple[PolicyModel, PolicyModel]:
    """Of one seed: a loop over the experts, and grouped ones."""
    changes = SHAPES["experts"] | {"bf16": request.param}
    return tuple(tiny_policy(tiny_config(**changes | loop)) for loop in ({"no_moe_grouped_gemm": True}, {}))


def test_the_same_names_and_weights(pair: tuple[PolicyModel, PolicyModel]) -> None:
    loop, grouped = (list(policy.named_parameters()) for policy in pair)
    assert [name for name, _ in grouped] == [name for name, _ in loop]
    assert all(torch.equal(own, other) for (_, own), (_, other) in zip(grouped, loop, strict=True))
    assert len([*pair[1].parameters()]) < len([*pair[0].parameters()])


def test_the_same_logprobs_and_gradients_to_the_bit(
    pair: tuple[PolicyModel, PolicyModel], one_rank: ParallelGroups
) -> None:
    batch, found = collate(random_samples(6), "cpu"), []
    for policy in pair:
        scorer = Scorer(policy, one_rank, 1.0)
        logprobs = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
        logprobs.sum().backward()
        layers = [layer.mlp.experts for layer in policy.gpt.decoder.layers]
        found.append((logprobs.detach(), [_gradients(experts) for experts in layers], policy.gpt.embedding))
    (loop, of_loop, first), (grouped, of_grouped, second) = found
    assert torch.equal(grouped, loop)
    assert torch.equal(second.word_embeddings.weight.grad, first.word_embeddings.weight.grad)
    for own, other in zip(of_grouped, of_loop, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def _gradients(experts: torch.nn.Module) -> list[torch.Tensor]:
    """Of fc1 and fc2, [experts, out, in]; an expert without tokens has none in the loop."""
    if hasattr(experts, "linear_fc1"):
        return [experts.linear_fc1.weight.grad, experts.linear_fc2.weight.grad]
    singles = [(one.linear_fc1.weight, one.linear_fc2.weight) for one in experts.local_experts]
    return [
        torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])
        for weights in zip(*singles, strict=True)
    ]


def test_rollouts_draw_the_same(pair: tuple[PolicyModel, PolicyModel]) -> None:
    loop, grouped = (
        generate(policy, rollout_engine(policy), ragged_requests(4, num_samples=2, max_new_tokens=12))
        for policy in pair
    )
    assert grouped == loop


@pytest.mark.parametrize("loop", [False, True])
def test_the_step_of_the_router_that_megatron_compiles_is_left_out(
    one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    """On CUDA it would be compiled at its first call, in a decode step or an update, to do nothing."""
    policy = tiny_policy(tiny_config(num_experts=4, **{"no_moe_grouped_gemm": True} if loop else {}))
    layer, called = policy.gpt.decoder.layers[0].mlp, []
    (compiled,) = (name for name in vars(TopKRouter) if name.endswith("apply_expert_bias"))
    monkeypatch.setattr(TopKRouter, compiled, lambda *_, **__: called.append("megatron's"))
    tokens = torch.randn(4, policy.config.hidden_size)
    trained = layer.train()(tokens[:, None])[0]
    with torch.no_grad():
        layer.eval().decode(tokens, SimpleNamespace(ops=RolloutOps(fused=False)))
    assert trained.requires_grad and not called


@torch.no_grad()
@pytest.mark.parametrize("bf16", [False, True])
def test_a_dispatch_on_the_device_is_megatrons(one_rank: ParallelGroups, bf16: bool) -> None:
    """To the bit: each token's sum of three has megatron's order. Few tokens leave experts without one."""
    policy = tiny_policy(tiny_config(num_experts=8, moe_router_topk=3, bf16=bf16))
    layer = policy.gpt.decoder.layers[0].mlp.eval()
    tokens = torch.randn(64, policy.config.hidden_size, dtype=policy.config.params_dtype)
    plan = SimpleNamespace(ops=RolloutOps(fused=False))
    for count in (1, 2, 64):
        wanted = layer(tokens[:count, None])[0][:, 0]
        assert torch.equal(layer.decode(tokens[:count], plan).output, wanted)


def test_a_state_dict_has_single_experts(pair: tuple[PolicyModel, PolicyModel]) -> None:
    loop, grouped = (_tensors(policy.gpt.state_dict()) for policy in pair)
    assert grouped.keys() == loop.keys()
    assert all(torch.equal(grouped[name], loop[name]) for name in loop)
    pair[1].gpt.load_state_dict({name: 2 * values for name, values in loop.items()}, strict=False)
    for name, values in _tensors(pair[1].gpt.state_dict()).items():
        assert torch.equal(values, 2 * loop[name])


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in state.items() if torch.is_tensor(values)}


def test_checkpoints_have_the_same_pieces(pair: tuple[PolicyModel, PolicyModel]) -> None:
    loop, grouped = (_pieces(policy.gpt.sharded_state_dict()) for policy in pair)
    assert grouped == loop


def _pieces(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Key, place and numbers of everything that is written."""
    tensors: list[ShardedTensor | ShardedObject] = []

    def collect(value: Any) -> None:
        if isinstance(value, ShardedTensorFactory):
            value = value.build()
        if isinstance(value, ShardedTensor | ShardedObject):
            tensors.append(value)
        elif isinstance(value, list | dict):
            for one in value.values() if isinstance(value, dict) else value:
                collect(one)

    collect(state)
    return sorted(
        (one.key, one.global_shape, one.global_offset, one.replica_id, _sum(one.data))
        for one in tensors
    )


def _sum(values: torch.Tensor | None) -> float:
    return values.double().sum().item() if torch.is_tensor(values) else 0.0
