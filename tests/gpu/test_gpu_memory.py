"""The two phases' memory on one GPU. Run with: bash tests/run.sh tests/gpu/test_gpu_memory.py"""

from __future__ import annotations

import gc

import pytest
import torch

from tests.support.samples import random_samples, tiny_optimization, weights_of

pytestmark = pytest.mark.gpu
KINDS = [{"bf16": True}, {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True}]


def _train(groups, optimization, seed: int) -> None:
    from megatron_rl.trainer.packing import collate
    from megatron_rl.trainer.scoring import Scorer
    from megatron_rl.trainer.update import update

    scorer = Scorer(optimization.policy, groups, 1.0)

    def loss(logits, batch):
        logprobs = scorer.select(logits, batch).current_logprobs
        return -(logprobs * batch.loss_mask).sum(), batch.loss_mask.sum(), {}

    batch = collate(random_samples(3, seed), optimization.policy.device)
    outcome, _ = update(optimization, [batch], scorer.forward, loss)
    assert outcome.applied


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("changes", KINDS, ids=["replicated", "distributed"])
def test_the_state_leaves_the_device_and_comes_back_bit_for_bit(one_rank, changes) -> None:
    from megatron_rl.run.memory.holdings import state_storages
    from tests.unit.phases.test_holdings import Mover

    plain, moved = tiny_optimization(**changes), tiny_optimization(**changes)
    mover = Mover(moved)
    for seed in range(3):
        if seed:
            before = _allocated()
            storages = state_storages(moved) + mover.gradients.storages
            size = sum(storage.nbytes() for storage in storages)
            with mover.away():
                assert before - _allocated() >= size > 0
                taken = torch.full((size,), 255, dtype=torch.uint8, device="cuda")  # what was there is overwritten
                assert all(piece.is_pinned() for pieces in mover.state.host for piece in pieces)
                del taken
            assert abs(_allocated() - before) <= 512 * len(storages)
        for optimization in (plain, moved):
            _train(one_rank, optimization, seed)
        assert all(torch.equal(a, b) for a, b in zip(weights_of(plain.policy), weights_of(moved.policy), strict=True))


@pytest.mark.parametrize("recipe", ["none", "fp8"])
def test_fifty_cycles_allocate_nothing_new(one_rank, recipe: str) -> None:
    from megatron_rl.models.gpt import rollout_mode
    from megatron_rl.platform.device import DeviceMemory
    from megatron_rl.quantization.rollout import RolloutQuantization
    from megatron_rl.run.memory.cache import CacheResidency
    from tests.support.generation import drain, ragged_requests, rollout_engine
    from tests.unit.phases.test_holdings import Mover

    # fp8 products want multiples of 16
    optimization = tiny_optimization(bf16=True, hidden_size=64, ffn_hidden_size=128)
    policy = optimization.policy
    quantization = RolloutQuantization(policy.gpt, recipe, (), lambda rows: None)
    engine, mover = rollout_engine(policy), Mover(optimization)
    residency = CacheResidency(engine.cache_tensors, DeviceMemory(policy.device), training_need=2**60)
    seen = []
    for cycle in range(50):
        requests = ragged_requests(6, num_samples=3, max_new_tokens=12)
        with rollout_mode(policy, optimization.wrapped), mover.away():
            residency.before_rollout()
            with quantization.rollout():
                engine.begin(cycle, cycle)
                for wanted in requests:
                    engine.submit(wanted)
                drain(engine, requests)
            residency.after_rollout()
        residency.training_need = 2**60  # the cache is to go every time
        _train(one_rank, optimization, cycle)
        quantization.weights_changed()
        seen.append(_allocated())
    assert residency.generation == 49
    # The last batch, which stays, is of another size each time: 5 kB more were seen. One tensor a cycle would be 15 kB.
    assert max(seen[40:]) <= max(seen[10:20]) + 2**13


def test_free_memory_counts_what_the_allocator_keeps() -> None:
    from megatron_rl.platform.device import DeviceMemory

    memory = DeviceMemory(torch.device("cuda", torch.cuda.current_device()))
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    while_taken = memory.free()
    del block
    assert 0.9 * 2**28 < memory.free() - while_taken < 1.1 * 2**28
    assert memory.free() <= torch.cuda.mem_get_info()[1]
    assert memory.peak() >= 2**28


def test_there_may_be_no_memory_for_the_same_addresses() -> None:
    """What torch's allocator only keeps is not in the way; what is in use is, until it is free."""
    from megatron_rl.platform.device import is_out_of_memory
    from megatron_rl.platform.reserved import CudaDriver, Reserved

    driver = CudaDriver(torch.device("cuda", torch.cuda.current_device()))
    if not driver.can_reserve:
        pytest.skip("this GPU has no virtual memory management")
    block = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    memory = Reserved(driver, [block])
    address = block.data_ptr()
    memory.release()
    torch.cuda.empty_cache()
    others = torch.empty(torch.cuda.mem_get_info()[0] - 2**29, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as refused:
        memory.restore()
    assert is_out_of_memory(refused.value)
    assert memory.is_released
    del others
    memory.restore()
    block[-1] = 3
    assert (block.data_ptr(), block.sum().item(), block.is_cuda) == (address, 3, True)


def test_an_impossible_allocation_is_recognised() -> None:
    from megatron_rl.platform.device import is_out_of_memory, reason_of

    with pytest.raises(torch.OutOfMemoryError) as refused:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(refused.value)
    assert "Tried to allocate" in reason_of(refused.value)
