"""The KV cache: how much fits, and what lands where."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.inference.kv_cache import CacheShape, SlotCache
from megatron_rl.models import PolicyModel
from tests.support.generation import rollout_engine

SHAPE = CacheShape(layers=3, groups=2, width=8, max_length=100, element_bytes=2)
BYTES = 2 * 3 * 2 * 8 * 100 * 2
"""Keys and values x layers x groups x width x positions x bytes."""


def test_bytes_of_one_sequence() -> None:
    assert SHAPE.bytes_per_slot == BYTES == 19200


def test_shape_of_a_model(policy: PolicyModel) -> None:
    assert CacheShape.of(policy.gpt, 48, torch.float32) == CacheShape(2, 2, 8, 48, 4)


@pytest.mark.parametrize(
    ("budget_bytes", "slots"), [(BYTES, 1), (3 * BYTES - 1, 2), (3 * BYTES, 3), (100 * BYTES, 5)]
)
def test_slots_within_a_budget(budget_bytes: int, slots: int) -> None:
    assert SHAPE.slots_within(budget_bytes / 2**30, wanted=5) == slots


def test_without_a_budget_all_slots_are_made() -> None:
    assert SHAPE.slots_within(None, wanted=5) == 5


@pytest.mark.parametrize("max_length", [1, 37, 100, 4321, 131072, 10_000_019])
def test_the_refusal_names_a_budget_that_works(max_length: int) -> None:
    shape = CacheShape(layers=3, groups=2, width=8, max_length=max_length, element_bytes=2)
    needed = shape.bytes_per_slot / 2**30
    with pytest.raises(EngineError, match=f"one sequence of {max_length} tokens") as refused:
        shape.slots_within(needed * 0.99, wanted=5)
    advice = float(re.search(r"buffer-size-gb (\S+) or more", str(refused.value)).group(1))
    assert shape.slots_within(advice, wanted=5) == 1
    assert advice <= needed * 1.011, "asks for more than three digits of rounding explain"


def test_the_engine_keeps_to_the_budget(policy: PolicyModel) -> None:
    bytes_per_slot = CacheShape.of(policy.gpt, 48, torch.float32).bytes_per_slot
    engine = rollout_engine(policy, max_batch_size=8, cache_budget_gb=3.5 * bytes_per_slot / 2**30)
    assert engine.num_slots == 3


# -- contents ----------------------------------------------------------------------------------


def cache(slots: int = 4) -> SlotCache:
    """Two layers of 4 slots, 2 groups, 6 positions, width 3."""
    shape = CacheShape(layers=2, groups=2, width=3, max_length=6, element_bytes=4)
    return SlotCache(shape, slots, torch.float32, torch.device("cpu"))


def test_a_new_cache_is_zero() -> None:
    """Not NaN: a masked cell would turn the whole row into NaN."""
    fresh = cache()
    assert all(not buffer.any() for buffer in (*fresh.keys, *fresh.values))


def test_a_token_is_written_at_its_position_of_its_slot_only() -> None:
    filled = cache()
    key, value = torch.randn(2, 1, 2, 3), torch.randn(2, 1, 2, 3)
    filled.write(1, filled.cells_at(torch.tensor([5, 0])), key, value)
    expected = torch.zeros(4, 2, 6, 3)
    expected[0, :, 5], expected[1, :, 0] = key[0, 0], key[1, 0]
    assert torch.equal(filled.keys[1], expected)
    assert torch.equal(filled.values[1][0, :, 5], value[0, 0])
    assert not filled.keys[0].any()


def test_a_prompt_is_copied_to_all_slots_of_its_group() -> None:
    filled = cache()
    key, value = torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 3)
    filled.fill(0, torch.tensor([3, 0, 2]), torch.tensor([0, 1, 0]), key, value)
    for slot, prompt in ((3, 0), (0, 1), (2, 0)):
        assert torch.equal(filled.keys[0][slot, :, :4], key[prompt])
        assert torch.equal(filled.values[0][slot, :, :4], value[prompt])
    assert not filled.keys[0][1].any()
    assert not filled.keys[0][:, :, 4:].any()


def test_a_move_copies_every_layer_up_to_its_length() -> None:
    filled = cache()
    for buffer in (*filled.keys, *filled.values):
        buffer.copy_(torch.randn_like(buffer))
    before = [buffer.clone() for buffer in (*filled.keys, *filled.values)]
    filled.move(torch.tensor([3, 2]), torch.tensor([0, 1]), length=4)
    for buffer, old in zip((*filled.keys, *filled.values), before, strict=True):
        assert torch.equal(buffer[0, :, :4], old[3, :, :4])
        assert torch.equal(buffer[1, :, :4], old[2, :, :4])
        assert torch.equal(buffer[:2, :, 4:], old[:2, :, 4:])
        assert torch.equal(buffer[2:], old[2:])
