"""The KV cache: how much fits, and what lands where."""

from __future__ import annotations

import re
from array import array

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.families import LayerCache
from megatron_rl.inference.kv_cache import Cache, PagedCache, RowCache, blocks_within, rows_within
from megatron_rl.models.gpt import PolicyModel
from tests.support.generation import rollout_engine

FP32_ON_CPU = torch.float32, torch.device("cpu")
LAYERS = [LayerCache(2, 8, 8)] * 3


def sequence_bytes(max_length: int) -> int:
    """Of three layers in two bytes a number."""
    return 2 * sum(layer.numbers(max_length) for layer in LAYERS)


BYTES = 2 * 3 * 2 * 8 * 100 * 2
"""Keys and values x layers x heads x width x positions x bytes."""


@pytest.mark.parametrize(
    ("budget_bytes", "rows"), [(BYTES, 1), (3 * BYTES - 1, 2), (3 * BYTES, 3), (100 * BYTES, 5)]
)
def test_rows_within_a_budget(budget_bytes: int, rows: int) -> None:
    assert sequence_bytes(100) == BYTES
    assert rows_within(budget_bytes / 2**30, BYTES, 100, wanted=5) == rows


def test_without_a_budget_all_rows_are_made() -> None:
    assert rows_within(None, BYTES, 100, wanted=5) == 5


@pytest.mark.parametrize("max_length", [1, 37, 100, 4321, 131072, 10_000_019])
def test_the_refusal_names_a_budget_that_works(max_length: int) -> None:
    size = sequence_bytes(max_length)
    with pytest.raises(EngineError, match=f"one sequence of {max_length} tokens") as refused:
        rows_within(size / 2**30 * 0.99, size, max_length, wanted=5)
    advice = float(re.search(r"buffer-size-gb (\S+) or more", str(refused.value)).group(1))
    assert rows_within(advice, size, max_length, wanted=5) == 1
    assert advice <= size / 2**30 * 1.011, "asks for more than three digits of rounding explain"


def test_the_engine_keeps_to_the_budget(policy: PolicyModel) -> None:
    size = 4 * policy.layout.cache_numbers(48)
    engine = rollout_engine(policy, max_batch_size=8, cache_budget_gb=3.5 * size / 2**30)
    assert engine.max_batch_size == 3
    assert sum(tensor.nbytes for tensor in engine.cache_tensors) == 3 * size


def test_keys_and_values_of_a_layer_may_differ_in_width_from_those_of_another() -> None:
    layers = [LayerCache(2, 8, 4), LayerCache(2, 6, 6)]
    for cache in (RowCache(layers, 3, 20, *FP32_ON_CPU), PagedCache(layers, 3, 20, 4, *FP32_ON_CPU)):
        for layer, (heads, key_width, value_width) in enumerate([(2, 8, 4), (2, 6, 6)]):
            key, value = torch.randn(1, 1, heads, key_width), torch.randn(1, 1, heads, value_width)
            cache.write(layer, cache.slot_mapping(torch.tensor([2]), torch.tensor([7])), key, value)
            assert cache.keys[layer].sum() == pytest.approx(key.sum().item(), abs=1e-5)
            assert cache.values[layer].sum() == pytest.approx(value.sum().item(), abs=1e-5)


# -- contents, the same in both layouts ----------------------------------------------------------


CONTENTS = [LayerCache(2, 3, 3)] * 2


@pytest.fixture(params=["rows", "pages of 1", "pages of 4"])
def cache(request: pytest.FixtureRequest) -> Cache:
    """Two layers of 4 slots, 2 groups, 6 positions, width 3."""
    if request.param == "rows":
        return RowCache(CONTENTS, 4, 6, *FP32_ON_CPU)
    return PagedCache(CONTENTS, 4, 6, int(request.param[-1]), *FP32_ON_CPU)


def contents(cache: Cache) -> torch.Tensor:
    """[keys and values, layers, slots, positions, groups, width]."""
    if isinstance(cache, RowCache):
        return torch.stack([torch.stack(buffers) for buffers in (cache.keys, cache.values)]).transpose(3, 4).clone()
    rows = [[buffer[cache.table.long()].flatten(1, 2)[:, :6] for buffer in kind] for kind in (cache.keys, cache.values)]
    return torch.stack([torch.stack(kind) for kind in rows])


def filled(cache: Cache) -> torch.Tensor:
    """Random numbers in every slot; returns the contents."""
    slots, positions = torch.arange(4).repeat_interleave(6), torch.arange(6).repeat(4)
    for layer in range(2):
        key, value = torch.randn(24, 1, 2, 3), torch.randn(24, 1, 2, 3)
        cache.write(layer, cache.slot_mapping(slots, positions), key, value)
    return contents(cache)


def test_a_new_cache_is_zero(cache: Cache) -> None:
    """Not NaN: a masked cell would turn the whole row into NaN."""
    assert all(not buffer.any() for buffer in (*cache.keys, *cache.values))


def test_a_token_is_written_at_its_position_of_its_slot_only(cache: Cache) -> None:
    key, value = torch.randn(2, 1, 2, 3), torch.randn(2, 1, 2, 3)
    cache.write(1, cache.slot_mapping(cache.rows[:2], torch.tensor([5, 0])), key, value)
    expected = torch.zeros(2, 2, 4, 6, 2, 3)
    expected[0, 1, 0, 5], expected[0, 1, 1, 0] = key[0, 0], key[1, 0]
    expected[1, 1, 0, 5], expected[1, 1, 1, 0] = value[0, 0], value[1, 0]
    assert torch.equal(contents(cache), expected)


def test_tokens_of_any_slots(cache: Cache) -> None:
    key, value = torch.randn(3, 1, 2, 3), torch.randn(3, 1, 2, 3)
    cache.write(0, cache.slot_mapping(torch.tensor([3, 1, 3]), torch.tensor([0, 4, 5])), key, value)
    expected = torch.zeros(4, 6, 2, 3)
    expected[3, 0], expected[1, 4], expected[3, 5] = key[:, 0]
    assert torch.equal(contents(cache)[0, 0], expected)


def units(cache: Cache, slot: int) -> torch.Tensor:
    """What `copy` copies: the slot, or its pages."""
    return torch.tensor([slot]) if isinstance(cache, RowCache) else cache.table[slot].long()


def test_copies_happen_at_once(cache: Cache) -> None:
    """Two slots exchange what they hold, and one of them goes to a third as well."""
    before = filled(cache)
    source = torch.cat([units(cache, slot) for slot in (3, 1, 3)])
    destination = torch.cat([units(cache, slot) for slot in (1, 3, 0)])
    cache.copy(source, destination, length=5)
    after = contents(cache)
    assert torch.equal(after[:, :, [1, 3, 0], :5], before[:, :, [3, 1, 3], :5])
    assert torch.equal(after[:, :, 2], before[:, :, 2])
    key = torch.randn(1, 1, 2, 3)
    cache.write(0, cache.slot_mapping(cache.rows[:1], torch.tensor([5])), key, key)
    assert torch.equal(contents(cache)[:, 0, 3, :5], before[:, 0, 1, :5]), "what one writes, another does not see"


# -- pages ---------------------------------------------------------------------------------------


def test_the_table_comes_from_the_host_and_keeps_its_place() -> None:
    """A captured graph reads it at the address it had then."""
    cache = PagedCache(CONTENTS, 2, 6, 4, *FP32_ON_CPU, num_blocks=3)
    assert cache.keys[0].shape[0] == 4, "three pages and the one that is nobody's"
    address, view = cache.table.data_ptr(), cache.table
    assert not view.any()
    cache.set_block_table(array("i", [2, 0, 1, 3]))
    assert view.tolist() == [[2, 0], [1, 3]]
    assert cache.table.data_ptr() == address
    assert cache.slot_mapping(torch.tensor([0, 1, 1]), torch.tensor([3, 0, 5])).tolist() == [11, 4, 13]


PAGE_BYTES = 2 * 3 * 2 * 8 * 16 * 2


@pytest.mark.parametrize(
    ("budget_pages", "pages"), [(8, 7), (8.9, 7), (36, 35), (36.5, 35), (1000, 35)]
)
def test_pages_within_a_budget(budget_pages: float, pages: int) -> None:
    """One sequence of 100 tokens has 7 pages of 16, and the page that is nobody's needs its room too."""
    assert blocks_within(budget_pages * PAGE_BYTES / 2**30, BYTES, 100, 16, rows=5) == pages


def test_without_a_budget_every_slot_can_be_filled() -> None:
    assert blocks_within(None, BYTES, 100, 16, rows=5) == 35


@pytest.mark.parametrize("max_length", [1, 37, 100, 4321, 131072])
def test_the_refusal_of_pages_names_a_budget_that_works(max_length: int) -> None:
    size = sequence_bytes(max_length)
    needed = (-(-max_length // 16) + 1) * PAGE_BYTES / 2**30
    with pytest.raises(EngineError, match=f"one sequence of {max_length} tokens in pages of 16") as refused:
        blocks_within(needed * 0.99, size, max_length, 16, rows=5)
    advice = float(re.search(r"buffer-size-gb (\S+) or more", str(refused.value)).group(1))
    assert blocks_within(advice, size, max_length, 16, rows=5) >= -(-max_length // 16)
    assert advice <= needed * 1.011, "asks for more than three digits of rounding explain"
