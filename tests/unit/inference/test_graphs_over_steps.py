"""Graphs of the decode step over RL steps: updates and re-quantised weights keep them, moved memory drops them."""

from __future__ import annotations

import weakref

import pytest
import torch

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.device import DeviceMemory
from megatron_rl.run.memory.cache import CacheResidency
from megatron_rl.trainer.optimizer import Optimization
from tests.support.generation import generate, largest_gap, rollout_engine, tokens
from tests.support.quantized import complete, disturb, linears_of, quantizable_policy, rollout_quantization
from tests.support.tape import requests_of_a_step, taped
from tests.support.tiny import tiny_config, tiny_policy


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"use_distributed_optimizer": True, "bf16": True}])
def test_an_optimizer_step_needs_no_recording(settings: dict[str, bool], one_rank: object) -> None:
    """The run's own optimizer changes the weights in place; the next replay reads the new ones."""
    config = tiny_config(lr=0.1, **settings)
    policy = tiny_policy(config)
    optimization = Optimization(policy, config)
    engine, twin = rollout_engine(policy), rollout_engine(policy)
    recorder = taped(engine, policy, key_lengths=(48,))  # how far a burst reaches depends on who ends when
    before = generate(policy, engine, requests_of_a_step())
    recorded = recorder.recorded
    for step in range(3):
        optimization.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for parameter in policy.gpt.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        assert optimization.step().applied
    after = generate(policy, engine, requests_of_a_step())
    assert recorder.recorded == recorded > 0
    eager = generate(policy, twin, requests_of_a_step())
    assert tokens(after) == tokens(eager) != tokens(before)
    assert largest_gap(after, eager) < 1e-5


@pytest.mark.parametrize("recipe", ["int8", "fp8", "fp8_block", "int8_smooth"])
def test_a_requantisation_needs_no_recording(recipe: str, one_rank: object) -> None:
    policy = quantizable_policy()
    quantization = rollout_quantization(policy, recipe)
    engine, twin = rollout_engine(policy), rollout_engine(policy)
    recorder = taped(engine, policy, key_lengths=(48,))  # how far a burst reaches depends on who ends when
    complete(policy, engine, quantization, requests_of_a_step())  # calibrated and audited: eager
    assert quantization.linears.layers
    before = complete(policy, engine, quantization, requests_of_a_step())
    recorded, replayed = recorder.recorded, recorder.replayed
    assert replayed > 0
    disturb(policy, 0.3)
    quantization.weights_changed()
    after = complete(policy, engine, quantization, requests_of_a_step())
    assert recorder.recorded == recorded
    assert recorder.replayed > replayed
    eager = complete(policy, twin, quantization, requests_of_a_step())
    assert tokens(after) == tokens(eager) != tokens(before)
    assert largest_gap(after, eager) < 1e-5


def test_quantised_rollouts_and_plain_evaluations_keep_their_own_graphs(one_rank: object) -> None:
    policy = quantizable_policy()
    linears = linears_of(policy, "int8")
    engine, twin = rollout_engine(policy), rollout_engine(policy)
    recorder = taped(engine, policy)
    wanted = requests_of_a_step()
    for turn in range(3):
        with linears.installed():
            quantised = generate(policy, engine, wanted)
            assert largest_gap(quantised, generate(policy, twin, wanted)) < 1e-5
            with linears.suspended():
                plain = generate(policy, engine, wanted)
                assert largest_gap(plain, generate(policy, twin, wanted)) < 1e-5
        if turn == 0:
            recorded = recorder.recorded
    assert recorder.recorded == recorded
    assert quantised != plain


def test_graphs_of_a_recipe_go_with_its_buffers(one_rank: object) -> None:
    policy = quantizable_policy()
    quantization = rollout_quantization(policy, "int8")
    engine, twin = rollout_engine(policy), rollout_engine(policy)
    recorder = taped(engine, policy)
    for _ in range(2):
        complete(policy, engine, quantization, requests_of_a_step())
    recorded = recorder.recorded
    codes = weakref.ref(quantization.linears.layers[0].weight.codes)
    assert quantization.fall_back() is not None
    for _ in range(2):
        groups = complete(policy, engine, quantization, requests_of_a_step())
    assert recorder.recorded > recorded
    assert groups == complete(policy, twin, quantization, requests_of_a_step())
    assert codes() is None, "a tape holds what it reads, so this also says that the tapes are gone"


def test_a_cache_made_anew_is_recorded_anew(policy: PolicyModel, caplog: pytest.LogCaptureFixture) -> None:
    engine = rollout_engine(policy)
    recorder = taped(engine, policy)
    wanted = requests_of_a_step()
    first = generate(policy, engine, wanted)
    recorded = recorder.recorded
    cache = engine.cache
    cache.keys = [torch.zeros_like(keys) for keys in cache.keys]
    assert tokens(generate(policy, engine, wanted)) == tokens(first)
    assert recorder.recorded == 2 * recorded
    assert ["moved in memory" in r.message for r in caplog.records] == [True]


def test_a_cache_that_goes_takes_its_graphs_along(policy: PolicyModel, caplog: pytest.LogCaptureFixture) -> None:
    """Their memory is free while the policy is trained, and every rank records anew, whatever its addresses are.

    The kernels are compiled by then, so nothing is warmed up again.
    """
    engine = rollout_engine(policy)
    recorder = taped(engine, policy)
    device = DeviceMemory(policy.device)
    residency = CacheResidency(engine.cache_tensors, device, 2**60, forget_graphs=engine.forget_graphs)
    wanted = requests_of_a_step()
    first = tokens(generate(policy, engine, wanted))
    recorded = recorder.recorded
    assert recorder.warmed == recorded
    residency.after_rollout()
    assert not engine.runner.graphs.recorded
    residency.before_rollout()
    assert tokens(generate(policy, engine, wanted)) == first
    assert (recorder.recorded, recorder.warmed) == (2 * recorded, recorded)
    assert "moved in memory" not in caplog.text


def test_weights_that_moved_are_recorded_anew_with_a_warning(
    one_rank: object, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy()
    engine = rollout_engine(policy, stop_ids=())  # so that other weights make no shorter answers
    recorder = taped(engine, policy)
    wanted = requests_of_a_step()
    generate(policy, engine, wanted)
    recorded = recorder.recorded
    parameter = policy.gpt.decoder.layers[1].mlp.linear_fc2.weight
    parameter.data = parameter.data * -2.0
    after = generate(policy, engine, wanted)
    assert recorder.recorded == 2 * recorded
    assert tokens(after) == tokens(generate(policy, rollout_engine(policy, stop_ids=()), wanted))
    (line,) = [r.message for r in caplog.records]
    assert "moved in memory" in line
