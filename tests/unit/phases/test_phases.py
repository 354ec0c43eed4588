"""Flags, estimate and free memory together: the budget an engine gets, and who is where in a rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import EngineError
from megatron_rl.platform.device import DeviceMemory
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.run.memory.estimate import estimate, slot_bytes
from megatron_rl.run.memory.holdings import Gradients, state_storages
from megatron_rl.run.memory.phases import Phases
from megatron_rl.trainer.optimizer import Optimization
from tests.support.generation import rollout_engine
from tests.support.ranks import run_ranks
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

OFFLOAD = {"rl_offload_optimizer_during_inference": True}


def nothing() -> None:
    """No graphs, no calibration."""


def engine_of(cache: Sequence[torch.Tensor], forget_graphs: Callable[[], None] = nothing) -> SimpleNamespace:
    """As much of an engine as its memory."""
    return SimpleNamespace(cache_tensors=list(cache), forget_graphs=forget_graphs)


def phases_of(config: RLConfig, groups: ParallelGroups) -> tuple[Phases, Optimization]:
    policy = tiny_policy(config)
    optimization = Optimization(policy, config)
    quantization = RolloutQuantization(policy.gpt, "none", (), lambda rows: None)
    phases = Phases(config, policy, groups, quantization)
    phases.hold_training(optimization)
    return phases, optimization


def phase_memory(groups: ParallelGroups, **changes: object) -> tuple[Phases, Optimization]:
    return phases_of(tiny_config(bf16=True, **changes), groups)


def slots(memory: Phases, optimization: Optimization) -> int:
    """Of an engine with the budget it is given; sixteen are wanted."""
    engine = rollout_engine(optimization.policy, max_batch_size=16, cache_budget_gb=memory.cache_budget_gb())
    return engine.max_batch_size


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets how much is free."""

    def is_free(size: float) -> None:
        monkeypatch.setattr(DeviceMemory, "free", lambda self: int(size))

    return is_free


def test_with_plenty_of_room_flags_decide(one_rank: ParallelGroups, free) -> None:
    free(2**40)
    assert phase_memory(one_rank)[0].cache_budget_gb() is None
    assert phase_memory(one_rank, inference_dynamic_batching_buffer_size_gb=0.25)[0].cache_budget_gb() == 0.25


def test_what_does_not_fit_is_cut_with_a_warning(
    one_rank: ParallelGroups, free, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    memory, optimization = phase_memory(one_rank)
    config = tiny_config(bf16=True)
    result = estimate(config, 1, VOCABULARY)
    moments = 8 * result.sizes.parameters_per_rank
    free(result.rollout_logits.rollout + moments - result.gradients.update + 5.5 * slot_bytes(config) / 0.9)
    with caplog.at_level(logging.INFO):
        assert slots(memory, optimization) == 5
    (line,) = [record for record in caplog.records if "KV cache" in record.message]
    assert line.levelno == logging.WARNING
    assert "do not fit" in line.message
    moving, moved = phase_memory(one_rank, **OFFLOAD)
    assert slots(moving, moved) == 16, "the state makes room for the whole batch"


def test_a_share_of_the_free_memory_sizes_the_engine(one_rank: ParallelGroups, free) -> None:
    config = tiny_config(bf16=True)
    result = estimate(config, 1, VOCABULARY)
    moments = 8 * result.sizes.parameters_per_rank  # yet to come
    in_rollouts = result.rollout_logits.rollout + moments - result.gradients.update
    free(in_rollouts + 11 * slot_bytes(config))
    assert slots(*phase_memory(one_rank, rl_rollout_memory_fraction=0.5)) == 5
    free(in_rollouts + 110 * slot_bytes(config))
    assert phase_memory(one_rank, rl_rollout_memory_fraction=0.5)[0].cache_budget_gb() is None, "all sixteen fit"


def test_no_room_for_one_sequence(one_rank: ParallelGroups, free) -> None:
    free(1000)
    memory, _ = phase_memory(one_rank)
    with pytest.raises(EngineError, match="no room for the KV cache"):
        memory.cache_budget_gb()


@pytest.mark.parametrize("tight", [False, True])
def test_in_a_rollout_the_cache_is_there_and_the_state_is_not(one_rank: ParallelGroups, free, tight: bool) -> None:
    free(2**40)
    memory, optimization = phase_memory(one_rank, **OFFLOAD)
    engine = rollout_engine(optimization.policy)
    state, gradients = state_storages(optimization), Gradients(optimization).storages

    def taken(storages: list[torch.UntypedStorage]) -> bool:
        sizes = {storage.nbytes() > 0 for storage in storages}
        (taken,) = sizes
        return taken

    told: list[int] = []
    cache = [tensor.untyped_storage() for tensor in engine.cache_tensors]
    if tight:
        free(1000)
    residency = memory.hold(engine_of(engine.cache_tensors, lambda: told.append(len(told))), nothing)
    assert residency.is_released == tight
    for _ in range(2):
        with memory.rollouts():
            assert (taken(cache), taken(state), taken(gradients)) == (True, False, False)
        assert (taken(cache), taken(state), taken(gradients)) == (not tight, True, True)
    assert len(told) == (3 if tight else 0), "whoever holds graphs hears of it every time"


def test_an_update_takes_state_activations_and_logits(one_rank: ParallelGroups, free) -> None:
    """With the flag also what left the device: the decision falls before it comes home."""
    free(2**40)
    result = estimate(tiny_config(bf16=True), 1, VOCABULARY)
    moments, pass_ = 8 * result.sizes.parameters_per_rank, result.activations.update + result.training_logits.update
    needed = moments + pass_ + result.gradients.update
    assert phase_memory(one_rank)[0].hold(engine_of([]), nothing).training_need == needed
    away = result.gradients.update + 4 * result.sizes.parameters_per_rank
    assert phase_memory(one_rank, **OFFLOAD)[0].hold(engine_of([]), nothing).training_need == moments + pass_ + away


def budget_of_unequal_ranks() -> list[float | None]:
    """Runs on each rank: budgets when rank 1 has the least memory, and whether the cache stays."""
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.groups import initialize

    changes = {"tensor_model_parallel_size": 2}
    config = tiny_config(2, **changes)
    groups = initialize(config.parallel, current_platform())
    memory, _ = phases_of(config, groups)
    needed = estimate(config, 2, VOCABULARY)
    state = needed.optimizer.update - needed.gradients.update
    least = needed.rollout_logits.rollout + state + 4.5 * slot_bytes(config) / 0.9
    DeviceMemory.free = lambda self: int(least if groups.rank else 2**40)
    budget = memory.cache_budget_gb()
    DeviceMemory.free = lambda self: 0 if groups.rank else 2**40
    return [budget, memory.hold(engine_of([torch.zeros(4)]), nothing).is_released]


def test_ranks_plan_with_the_memory_of_the_worst() -> None:
    ranks = run_ranks("tests.unit.phases.test_phases:budget_of_unequal_ranks", 2)
    a_slot = slot_bytes(tiny_config(2, tensor_model_parallel_size=2)) / 2**30
    assert ranks[0] == ranks[1]
    assert ranks[0] == [pytest.approx(4.5 * a_slot, rel=1e-3), True]
