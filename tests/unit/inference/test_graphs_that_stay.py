"""Graphs over memory that leaves and comes back at reserved addresses: nothing is recorded again, tokens are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.loop import rl_step
from megatron_rl.platform import reserved
from megatron_rl.platform.device import DeviceMemory
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.platform.reserved import reserved_memory
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.run import base, generation
from megatron_rl.run.memory.cache import CacheResidency
from megatron_rl.run.training import record_updates
from tests.support.generation import generate, largest_gap, rollout_engine, tokens
from tests.support.quantized import complete, disturb, quantizable_policy
from tests.support.reserved import DEVICE, HostDriver
from tests.support.samples import all_equal, weights_of
from tests.support.tape import requests_of_a_step, taped
from tests.support.tiny import DELTA, LATENT, tiny_config, tiny_policy
from tests.support.toy import toy_run

CACHES: dict[str, dict[str, Any]] = {
    "slots": {}, "pages": {"attention_backend": "paged"}, "latents": LATENT, "states": DELTA,
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_comes_back_where_it_was_needs_no_recording(one_rank: ParallelGroups, kind: str) -> None:
    policy = tiny_policy(tiny_config(**CACHES[kind]))
    engine, twin = rollout_engine(policy), rollout_engine(policy)
    recorder = taped(engine, policy, key_lengths=(48,))
    driver = HostDriver()
    device = DeviceMemory(policy.device)
    residency = CacheResidency(
        engine.cache_tensors, device, 2**60, forget_graphs=engine.forget_graphs, offloadable=reserved_memory(driver)
    )
    wanted = requests_of_a_step()
    eager = generate(policy, twin, wanted)
    assert tokens(generate(policy, engine, wanted)) == tokens(eager)
    recorded = recorder.recorded
    for count in (1, 2):
        residency.after_rollout()
        assert residency.is_released
        assert driver.library.mapped == {}
        residency.before_rollout()
        replayed = recorder.replayed
        after = generate(policy, engine, wanted)
        assert recorder.replayed > replayed
        assert tokens(after) == tokens(eager)
        assert largest_gap(after, eager) < 1e-5
        assert residency.generation == count
    assert recorder.recorded == recorded > 0


@pytest.mark.parametrize("recipe", ["int8", "fp8_block", "int8_smooth"])
@pytest.mark.parametrize("flags", [{}, {"num_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}])
def test_copies_that_come_back_where_they_were_need_none(
    one_rank: ParallelGroups, recipe: str, flags: dict[str, Any]
) -> None:
    policy = quantizable_policy(**flags)
    driver = HostDriver()
    quantization = RolloutQuantization(policy.gpt, recipe, (), lambda _: None, offloadable=reserved_memory(driver))
    engine, twin = rollout_engine(policy), rollout_engine(policy)
    recorder = taped(engine, policy, key_lengths=(48,))
    residency = CacheResidency(
        engine.cache_tensors, DeviceMemory(policy.device), 2**60, forget_graphs=engine.forget_graphs,
        offloadable=quantization.offloadable,
    )  # fmt: skip
    complete(policy, engine, quantization, requests_of_a_step())  # calibrated and audited: eager
    before = complete(policy, engine, quantization, requests_of_a_step())
    recorded = recorder.recorded
    for _ in range(2):
        residency.after_rollout()
        quantization.release()
        assert driver.library.mapped == {}
        disturb(policy, 0.3)
        quantization.weights_changed()
        residency.before_rollout()
        after = complete(policy, engine, quantization, requests_of_a_step())
        eager = complete(policy, twin, quantization, requests_of_a_step())
        assert tokens(after) == tokens(eager) != tokens(before)
    assert recorder.recorded == recorded


def test_copies_of_a_recipe_that_is_left_give_their_memory_back(one_rank: ParallelGroups) -> None:
    policy, driver = quantizable_policy(), HostDriver()
    quantization = RolloutQuantization(policy.gpt, "int8", (), lambda _: None, offloadable=reserved_memory(driver))
    kept = quantization.linears.layers[0].weight.codes
    assert quantization.fall_back() is not None
    assert len(driver.library.mapped) == (1 if quantization.is_quantized else 0)
    assert kept.data_ptr() not in driver.library.mapped


@pytest.mark.parametrize(
    ("flags", "device", "stay"),
    [
        ({"enable_cuda_graph": True, "rl_persist_cuda_graphs": True}, DEVICE, True),
        ({"cuda_graph_impl": "local", "rl_persist_cuda_graphs": True}, DEVICE, True),
        ({"enable_cuda_graph": True, "rl_persist_cuda_graphs": True}, torch.device("cpu"), False),
        ({"enable_cuda_graph": True}, DEVICE, False),
        ({"rl_persist_cuda_graphs": True}, DEVICE, True),
        ({"no_enable_cuda_graph": True, "rl_persist_cuda_graphs": True}, DEVICE, False),
    ],
)
def test_addresses_stay_where_graphs_on_a_gpu_are_to_stay(
    flags: dict[str, Any], device: torch.device, stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserved, "CudaDriver", lambda device: HostDriver())
    offloadable = base.leaving_of(tiny_config(**flags), device)
    assert offloadable([torch.zeros(3)]).keeps_addresses == stay


SHARDED = {
    "bf16": True, "use_distributed_optimizer": True, "rl_rollout_quantization": "fp8", "rl_max_new_tokens": 12,
}  # fmt: skip
"""Rollouts that read copies, and the weights that have none, which are set aside."""


@pytest.mark.parametrize("flags", [{}, SHARDED], ids=["plain", "quantised"])
def test_a_run_records_in_its_first_steps_alone(
    one_rank: ParallelGroups, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything leaves for every update, and changes no weight of the run."""
    plain = toy_run(tiny_config(**flags), one_rank)
    driver = HostDriver()
    monkeypatch.setattr(base, "leaving_of", lambda config, device: reserved_memory(driver))
    engines: list[RolloutEngine] = []

    def build(*given: Any, **options: Any) -> RolloutEngine:
        engines.append(RolloutEngine(*given, **options))
        return engines[-1]

    monkeypatch.setattr(generation, "RolloutEngine", build)
    kept = toy_run(tiny_config(**flags), one_rank)
    monkeypatch.setattr(DeviceMemory, "free", lambda self: 0)
    recorder = taped(engines[0], kept.policy, key_lengths=(48,))
    recorded = []
    for step in range(1, 5):
        for run in (plain, kept):
            record_updates(run, rl_step(run, step))
        assert kept.phases.cache.is_released
        assert driver.library.mapped == {}
        recorded.append(recorder.recorded)
    assert recorded[1] == recorded[3] > 0
    assert recorder.replayed > 0
    assert all_equal(weights_of(kept.policy), weights_of(plain.policy))
    for run in (plain, kept):
        run.closing.close()
