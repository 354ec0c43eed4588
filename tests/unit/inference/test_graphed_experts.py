"""Graphs of the decode step of a model with experts: grouped ones have them, a loop over experts cannot."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_rl.inference.engine import EngineOptions, GraphOptions
from megatron_rl.inference.graphs import DecodeGraphs, build_graphs, possible_graphs
from megatron_rl.types import Completion, Hints
from tests.support.generation import generate, largest_gap, ragged_requests, rollout_engine, tokens
from tests.support.quantized import disturb, linears_of
from tests.support.tape import on_a_gpu, requests_of_a_step, taped
from tests.support.tiny import tiny_config, tiny_policy

GRAPHS = EngineOptions(8, 48, graphs=GraphOptions(16))
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "add_qkv_bias": False}


def test_experts_in_a_loop_have_no_graphs(caplog: pytest.LogCaptureFixture, one_rank: object) -> None:
    """Nor could they: the capture of their layers is refused."""
    policy = tiny_policy(tiny_config(**EXPERTS, no_moe_grouped_gemm=True))
    engine = rollout_engine(policy)
    taped(engine, policy)
    generate(policy, engine, ragged_requests(2, max_new_tokens=8))
    assert "operation not permitted when stream is capturing" in caplog.text


@pytest.mark.parametrize("recipe", ["none", "int8", "fp8"])
def test_grouped_experts_have_graphs(recipe: str, one_rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay sends its own tokens to its own experts, and records them; an update changes weights in place."""
    policy = tiny_policy(tiny_config(**EXPERTS, rl_router_replay=True))
    engine, twin = (rollout_engine(policy, records_routing=True) for _ in range(2))
    on_a_gpu(monkeypatch)
    assert possible_graphs(GRAPHS, policy, None) == GRAPHS
    assert isinstance(build_graphs(engine.runner, policy, GRAPHS.graphs), DecodeGraphs)
    recorder = taped(engine, policy, key_lengths=(48,))  # how far a burst reaches depends on who ends when
    wanted = [dataclasses.replace(one, hints=Hints(wants_routing=True)) for one in requests_of_a_step()]
    linears = linears_of(policy, recipe)
    found, steps = [], 0
    for _ in range(2):
        linears.weights_changed()
        with linears.installed():
            groups, eager = generate(policy, engine, wanted), generate(policy, twin, wanted)
        assert tokens(groups) == tokens(eager)
        assert largest_gap(groups, eager) < 1e-5
        pairs = list(zip(_routing(groups), _routing(eager), strict=True))
        assert all(torch.equal(own, other) for own, other in pairs)
        assert len({tuple(ids) for own, _ in pairs for ids in own.flatten(0, 1).sort(-1).values.tolist()}) > 3
        steps += engine.statistics.decode_steps
        found.append((tokens(groups), recorder.recorded))
        disturb(policy, 0.3)
    assert recorder.replayed == steps > 0
    (first, recorded), (second, still) = found
    assert first != second
    assert still == recorded > 0


def _routing(groups: list[tuple[Completion, ...]]) -> list[torch.Tensor]:
    return [completion.routing for group in groups for completion in group]
