"""The KV cache's memory: its size from what is free, and its way out during training and back."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.run.memory.cache import CacheResidency, plan_cache
from tests.support.generation import generate, ragged_requests, rollout_engine, tokens

GB = 2**30


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


# -- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "room", "size", "is_local", "words"),
    [
        (None, (100, 0, 0), 20, False, ["20.00 GiB for 10 of 10", "the largest batch", "stays"]),
        (12, (100, 0, 0), 12, False, ["12.00 GiB for 6 of 10", "--inference-dynamic-batching-buffer-size-gb"]),
        (50, (100, 0, 0), 20, False, ["the largest batch"]),
        (None, (20, 10, 0), 9, True, ["9.00 GiB for 4 of 10", "20.00 GiB do not fit"]),
        (12, (20, 10, 0), 9, True, ["12.00 GiB do not fit"]),
        (None, (20, -20, 0), 20, False, ["the largest batch"]),  # optimizer state leaves during rollouts
        (None, (100, 0, 50), 20, False, ["an update takes 50.00 GiB", "stays"]),
        (None, (100, 0, 80), 20, False, ["an update takes 80.00 GiB", "is released"]),
        (None, (42, 0, 20), 20, False, ["stays"]),
        (None, (41, 0, 20), 20, False, ["is released"]),
    ],
)  # fmt: skip
def test_the_cache_takes_what_fits(
    asked, room: tuple[int, int, int], size: int, is_local: bool, words: list[str], log
) -> None:
    """Ten sequences of 2 GiB each; a tenth of what is there and of what an update takes stays unused."""
    in_bytes = [number * GB for number in room]
    assert plan_cache(2 * GB, 10, None if asked is None else asked * GB, *in_bytes) == (size * GB, is_local)
    (line,) = log.messages
    for text in words:
        assert text in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("share", "room", "size", "words"),
    [
        (0.5, (20, 4, 0), 8, ["8.00 GiB for 4 of 10", "--rl-rollout-memory-fraction 0.5"]),
        (1.0, (20, 4, 0), 16, ["16.00 GiB for 8 of 10"]),  # no margin where the user says so
        (0.5, (20, -20, 0), 20, ["the largest batch"]),
        (0.5, (100, 0, 0), 20, ["the largest batch"]),
    ],
)
def test_a_share_of_what_is_free(share: float, room: tuple[int, int, int], size: int, words: list[str], log) -> None:
    planned = plan_cache(2 * GB, 10, None, *(number * GB for number in room), share=share)
    assert planned == (size * GB, size < 20)
    (record,) = log.records
    assert record.levelno == logging.INFO, "what the user asked for is no warning"
    for text in words:
        assert text in record.getMessage()


def test_a_share_below_one_sequence_is_refused_in_one_line() -> None:
    with pytest.raises(EngineError, match=r"raise --rl-rollout-memory-fraction \(0.1\), lower") as refused:
        plan_cache(2 * GB, 10, None, 16 * GB, 0, 0, share=0.1)
    assert "1.60 GiB can be used" in str(refused.value)


@pytest.mark.parametrize("room", [(11, 9, 0), (5, 9, 0), (0, 0, 0)])
def test_less_than_one_sequence_is_refused_in_one_line(room: tuple[int, int, int]) -> None:
    with pytest.raises(EngineError, match="one sequence takes 2.00 GiB") as refused:
        plan_cache(2 * GB, 10, None, *(number * GB for number in room))
    assert f"{room[0]:.2f}" in str(refused.value)
    assert "lower --inference-max-seq-length" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_budget_below_one_sequence_is_the_engines_to_refuse() -> None:
    """It knows the layout of its cache, and its message names a budget that works."""
    assert plan_cache(2 * GB, 10, GB, 100 * GB, 0, 0) == (GB, False)


# -- residency -----------------------------------------------------------------------------------


@dataclass
class Numbers:
    """A device whose numbers the test sets."""

    free_bytes: int = 0
    allocated_bytes: int | None = None
    peak_bytes: int | None = None

    def free(self) -> int:
        return self.free_bytes

    def allocated(self) -> int | None:
        return self.allocated_bytes

    def peak(self) -> int | None:
        return self.peak_bytes


def two_buffers() -> list[torch.Tensor]:
    return [torch.full((4, 3), 1.0), torch.full((5,), 2.0)]


def sizes(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_a_cache_with_room_beside_training_stays() -> None:
    cache = two_buffers()
    residency = CacheResidency(cache, Numbers(free_bytes=1100), training_need=1000)
    for _ in range(2):
        residency.before_rollout()
        cache[1].fill_(7.0)
        residency.after_rollout()
        assert not residency.is_released
    assert residency.generation == 0
    assert cache[1].eq(7.0).all()


def test_a_cache_without_room_goes_and_comes_back_zeroed() -> None:
    cache, told = two_buffers(), []
    row = cache[0][1]
    device = Numbers(free_bytes=1099)
    residency = CacheResidency(cache, device, 1000, forget_graphs=lambda: told.append(residency.generation))
    assert residency.size == 4 * (12 + 5)
    for count in (1, 2, 3):
        residency.before_rollout()
        assert sizes(cache) == [48, 20]
        assert residency.generation == count - 1
        assert count == 1 or not any(buffer.any() for buffer in cache)
        for buffer in cache:
            buffer.fill_(float("nan"))
        residency.after_rollout()
        assert residency.is_released
        assert sizes(cache) == [0, 0]
    residency.before_rollout()
    cache[0][1, 2] = 3.0
    assert row.tolist() == [0.0, 0.0, 3.0], "views are views of what came back"
    assert told == [0, 1, 2]


def test_a_rollout_that_fails_gives_the_cache_up_without_asking_the_others() -> None:
    cache = two_buffers()
    residency = CacheResidency(cache, Numbers(free_bytes=10**9), 0, agree=lambda flag: pytest.fail("waits for others"))
    residency.before_rollout()
    residency.release()
    assert sizes(cache) == [0, 0]


def test_all_ranks_release_when_one_must() -> None:
    asked = []

    def agree(flag: bool) -> bool:
        asked.append(flag)
        return True

    residency = CacheResidency(two_buffers(), Numbers(free_bytes=10**9), 0, agree)
    residency.after_rollout()
    assert asked == [False]
    assert residency.is_released


def test_an_engine_that_owns_its_cache_is_left_alone() -> None:
    residency = CacheResidency([], Numbers(), 10**9, agree=lambda flag: pytest.fail("nothing to agree on"))
    residency.before_rollout()
    residency.after_rollout()
    assert not residency.is_released


def test_what_training_took_replaces_the_estimate() -> None:
    device, updates = Numbers(free_bytes=500, allocated_bytes=100, peak_bytes=150), [0]
    residency = CacheResidency(two_buffers(), device, training_need=400, updates=lambda: updates[0])
    residency.after_rollout()
    assert not residency.is_released
    device.peak_bytes = 160  # something else set a peak: there was no update
    residency.before_rollout()
    assert residency.training_need == 400
    residency.after_rollout()
    device.peak_bytes, updates[0] = 700, 1  # training set a new peak: 600 beyond what was there
    residency.before_rollout()
    assert residency.training_need == 600
    residency.after_rollout()
    assert residency.is_released
    device.allocated_bytes = 300  # the moments are there by now, so an update takes less
    residency.after_rollout()
    updates[0] = 2
    residency.before_rollout()
    assert residency.training_need == 400, "the peak was not reached again: at most 700 - 300"
    device.free_bytes = 440
    residency.after_rollout()
    assert not residency.is_released


def test_a_rollout_on_a_cache_that_came_back_draws_the_same_tokens(policy: PolicyModel) -> None:
    engine = rollout_engine(policy)
    requests = ragged_requests(5, num_samples=3, max_new_tokens=12)
    first = generate(policy, engine, requests)
    tensors = engine.cache_tensors
    assert sum(sizes(tensors)) > 0
    residency = CacheResidency(tensors, Numbers(), training_need=1)
    residency.after_rollout()
    assert sum(sizes(tensors)) == 0
    residency.before_rollout()
    assert tokens(generate(policy, engine, requests)) == tokens(first)
