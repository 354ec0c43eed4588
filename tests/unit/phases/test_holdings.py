"""What leaves the device during rollouts: memory goes, values and views come back, training notices nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.platform import device
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.memory import holdings
from megatron_rl.run.memory.holdings import Gradients, OptimizerState, state_storages
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import update
from tests.support.samples import random_samples, tiny_optimization, weights_of

KINDS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16 gradients": {"bf16": True, "grad_reduce_in_bf16": True},
    "distributed": {"use_distributed_optimizer": True},
    "distributed bf16": {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "momentum": {"optimizer": "sgd", "lr": 1e-3},
    "overlapped": {
        "bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes back with NaN in it: a CPU's allocator may well return the very bytes that were given up."""
    restore = device.restore

    def with_garbage(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
        return restore(storage, size).fill_(255)

    for module in (device, holdings):
        monkeypatch.setattr(module, "restore", with_garbage)


class Mover:
    """Gradients and state, as phases move them."""

    def __init__(self, optimization: Optimization) -> None:
        self.gradients, self.state = Gradients(optimization), OptimizerState(optimization)

    def leave(self) -> None:
        self.gradients.leave()
        self.state.leave()

    def come_home(self) -> None:
        self.state.come_home()
        self.gradients.come_home()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.leave()
        try:
            yield
        finally:
            self.come_home()


def train(groups: ParallelGroups, optimization: Optimization, seed: int) -> None:
    scorer = Scorer(optimization.policy, groups, 1.0)

    def loss(logits: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        logprobs = scorer.select(logits, batch).current_logprobs
        return -(logprobs * batch.loss_mask).sum(), batch.loss_mask.sum(), {}

    batch = collate(random_samples(3, seed), "cpu")
    outcome, _ = update(optimization, [batch, batch], scorer.forward, loss)
    assert outcome.applied


def state_of(optimization: Optimization) -> list[torch.Tensor]:
    """Copies of main parameters and of all that the inner optimizers keep, in one order."""
    found = []
    for part in optimization.optimizer.chained_optimizers:
        for parameter in part.get_parameters():
            values = part.optimizer.state.get(parameter, {})
            found += [parameter, *(values[name] for name in sorted(values) if torch.is_tensor(values[name]))]
    return [tensor.detach().clone() for tensor in found]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_training_with_and_without_is_the_same_to_the_bit(
    one_rank: ParallelGroups, changes: dict[str, object]
) -> None:
    plain, moved = tiny_optimization(**changes), tiny_optimization(**changes)
    mover = Mover(moved)
    for seed in range(4):
        with mover.away():
            assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in moved.wrapped[0].buffers)
        for optimization in (plain, moved):
            train(one_rank, optimization, seed)
        assert equal(weights_of(plain.policy), weights_of(moved.policy))
        assert equal(state_of(plain), state_of(moved))


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (0, []),
        (1000, [1000]),
        (2**20, [2**20]),
        (17 * 2**30, [2**34, 2**30]),
        (2**31 - 1, [2**exponent for exponent in range(30, 19, -1)] + [2**20 - 1]),
    ],
)
def test_pinned_memory_is_taken_in_powers_of_two(size: int, wanted: list[int]) -> None:
    assert holdings.pieces(size) == wanted
    rounded = sum(1 << max(0, piece - 1).bit_length() for piece in wanted)
    assert rounded - size < 2**20, "torch rounds each piece up to a power of two"


def test_a_state_of_many_pieces_comes_back(one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "pieces", lambda size: [size - size // 3, size // 3])  # sizes here are powers of two
    optimization = tiny_optimization(bf16=True, use_distributed_optimizer=True)
    train(one_rank, optimization, seed=1)
    before, mover = state_of(optimization), Mover(optimization)
    with mover.away():
        assert {len(pieces) for pieces in mover.state.host} == {2}
    assert equal(state_of(optimization), before)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_all_of_the_state_and_none_of_the_weights_leaves(
    one_rank: ParallelGroups, changes: dict[str, object]
) -> None:
    optimization = tiny_optimization(**changes)
    train(one_rank, optimization, seed=1)
    weights, state = weights_of(optimization.policy), state_of(optimization)
    parts = optimization.optimizer.chained_optimizers
    states = [values for part in parts for values in part.optimizer.state.values()]
    moments = [value for values in states for name, value in values.items() if name != "step"]
    assert all(tensor.untyped_storage().nbytes() for tensor in moments)
    with Mover(optimization).away():
        assert [tensor.untyped_storage().nbytes() for tensor in moments] == [0] * len(moments)
        assert equal(weights_of(optimization.policy), weights)
        if changes.get("bf16"):
            mains = [parameter for part in parts for parameter in part.get_parameters()]
            assert [parameter.untyped_storage().nbytes() for parameter in mains] == [0] * len(mains)
            assert all(parameter.grad is None for parameter in mains)
    assert equal(state_of(optimization), state)


def test_views_see_what_comes_back(one_rank: ParallelGroups) -> None:
    optimization = tiny_optimization(bf16=True, use_distributed_optimizer=True)
    train(one_rank, optimization, seed=1)
    (part,) = optimization.optimizer.chained_optimizers
    mains = [main for group in part.shard_fp32_from_float16_groups for main in group]
    tails, before = [main[3:] for main in mains], [main[3:].clone() for main in mains]
    gradient = optimization.policy.gpt.output_layer.weight.main_grad
    assert gradient.any()
    mover = Mover(optimization)
    with mover.away():
        pass
    assert equal(tails, before)
    mains[0].add_(1.0)
    assert torch.equal(tails[0], before[0] + 1.0), "the view is one of another memory"
    optimization.zero_grad()
    assert not gradient.any(), "the view is one of another memory"
    optimization.wrapped[0].buffers[0].grad_data.fill_(2.0)
    assert gradient.eq(2.0).all()


def test_before_the_first_update_there_are_main_parameters_only(one_rank: ParallelGroups) -> None:
    def kept(**changes: object) -> int:
        return sum(storage.nbytes() for storage in state_storages(tiny_optimization(**changes)))

    assert kept() == kept(use_distributed_optimizer=True) == 0
    optimization = tiny_optimization(bf16=True)
    numbers = sum(parameter.numel() for parameter in optimization.policy.gpt.parameters())
    assert kept(bf16=True) == 4 * numbers
    train(one_rank, optimization, seed=1)
    assert sum(storage.nbytes() for storage in state_storages(optimization)) == 12 * numbers
    assert sum(storage.nbytes() for storage in Gradients(optimization).storages) == 4 * numbers


def test_leaving_twice_and_coming_home_twice_change_nothing(one_rank: ParallelGroups) -> None:
    optimization = tiny_optimization(bf16=True)
    train(one_rank, optimization, seed=1)
    state, mover = state_of(optimization), Mover(optimization)
    for move in (mover.leave, mover.leave, mover.come_home, mover.come_home):
        move()
    assert equal(state_of(optimization), state)


def test_the_state_comes_home_when_the_rollout_fails(one_rank: ParallelGroups) -> None:
    optimization = tiny_optimization(bf16=True)
    train(one_rank, optimization, seed=1)
    state = state_of(optimization)
    with pytest.raises(ValueError, match="in a rollout"), Mover(optimization).away():
        raise ValueError("in a rollout")
    assert equal(state_of(optimization), state)


def test_a_return_that_runs_out_of_memory_goes_on_later(
    one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimization = tiny_optimization(bf16=True)
    train(one_rank, optimization, seed=1)
    state, mover = state_of(optimization), Mover(optimization)
    mover.leave()
    calls = []

    def scarce(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
        calls.append(size)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no more")
        return device.restore(storage, size)

    monkeypatch.setattr(holdings, "restore", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        mover.come_home()
    mover.come_home()
    assert equal(state_of(optimization), state)


def test_host_memory_is_taken_once(one_rank: ParallelGroups) -> None:
    optimization = tiny_optimization(bf16=True)
    mover = Mover(optimization)
    train(one_rank, optimization, seed=1)

    def addresses(then: Callable[[], None]) -> list[int]:
        with mover.away():
            then()
        return [piece.data_ptr() for pieces in mover.state.host for piece in pieces]

    first = addresses(lambda: None)
    assert len(first) == len(set(first)) > 10
    assert addresses(lambda: None) == first
