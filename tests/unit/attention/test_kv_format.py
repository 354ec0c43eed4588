"""What a KV cache of fewer bits gives back."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.models.attention.kv_format import FP8, KVFormat

CPU = torch.device("cpu")


def fp8(layers: int = 1, groups: int = 2, dtype: torch.dtype = torch.float32) -> KVFormat:
    return KVFormat(layers, groups, dtype, FP8, CPU)


def rows(*by_group: list[float]) -> torch.Tensor:
    """[1, 1, groups, D]."""
    return torch.tensor(by_group)[None, None]


def test_the_models_own_numbers_are_left_alone() -> None:
    numbers, key = KVFormat(1, 2, torch.float32, None, CPU), torch.randn(3, 1, 2, 4)
    assert numbers.stored == numbers.dtype and numbers.key_scales is None
    assert all(x is key for x in numbers.round_trip(0, key, key))
    assert all(x is key for x in numbers.pack(0, key, key))


def test_bf16_is_a_cast() -> None:
    numbers, key = KVFormat(1, 2, torch.float32, torch.bfloat16, CPU), torch.randn(3, 1, 2, 4)
    assert torch.equal(numbers.round_trip(0, key, key)[0], key.bfloat16().float())


@pytest.mark.parametrize(("largest", "scale"), [(112.0, 1.0), (112.1, 2.0), (1.0, 2**-6), (1e-30, 2**-60), (0, 2**-60)])
def test_a_scale_is_the_power_of_two_that_leaves_room_for_four_times_the_largest(largest: float, scale: float) -> None:
    numbers = fp8()
    numbers.calibrate(0, rows([largest, -0.5 * largest], [1.0, -112.0]), rows([0.0, -largest], [3.0, 4.0]))
    assert numbers.key_scales[0].tolist() == [scale, 1.0]
    assert numbers.value_scales[0].tolist() == [scale, 2**-4]


def test_layers_heads_keys_and_values_have_scales_of_their_own() -> None:
    numbers = fp8(layers=2)
    numbers.calibrate(1, rows([112.0], [224.0]), rows([448.0], [896.0]))
    assert numbers.key_scales.tolist() == [[1, 1], [1, 2]]
    assert numbers.value_scales.tolist() == [[1, 1], [4, 8]]


def test_the_first_prompts_of_a_rollout_set_the_scales_in_place() -> None:
    numbers = fp8()
    place = numbers.key_scales.data_ptr()
    for largest, expected in ((112.0, 1.0), (1e6, 1.0)):
        numbers.calibrate(0, rows([largest], [largest]), rows([1.0], [1.0]))
        assert numbers.key_scales[0, 0] == expected
    numbers.begin()
    numbers.calibrate(0, rows([112.0 * 64], [1.0]), rows([1.0], [1.0]))
    assert numbers.key_scales[0, 0] == 64 and numbers.key_scales.data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_of_four_digits(dtype: torch.dtype) -> None:
    numbers = fp8(dtype=dtype)
    key = torch.randn(100, 1, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers.calibrate(0, key, key)
    read, _ = numbers.round_trip(0, key, key)
    assert read.dtype == dtype
    error = (read.float() - key.float()).abs()
    assert (error <= key.float().abs() / 16 + 1e-4).all()
    assert error.max() > 0.01, "nothing was rounded"


def test_which_prompts_set_the_scale_does_not_matter_but_at_the_edges() -> None:
    """0.37 of a prompt with largest 1 and of one with largest 40 is the same number; so is 1e-2."""
    small, large = fp8(), fp8()
    small.calibrate(0, rows([1.0], [1.0]), rows([1.0], [1.0]))
    large.calibrate(0, rows([40.0], [40.0]), rows([40.0], [40.0]))
    assert large.key_scales[0, 0] > small.key_scales[0, 0]
    key = rows([0.37, -3.3, 0.02], [0.9, 1.9, 2.1])
    assert torch.equal(small.round_trip(0, key, key)[0], large.round_trip(0, key, key)[0])


@pytest.mark.parametrize("huge", [1e9, 3e38, math.inf])
def test_what_is_too_large_becomes_the_largest(huge: float) -> None:
    numbers = fp8()
    numbers.calibrate(0, rows([1.0], [1.0]), rows([1.0], [1.0]))
    read, _ = numbers.round_trip(0, rows([huge, -huge], [1.0, 0.0]), rows([1.0, 1.0], [1.0, 1.0]))
    assert read.flatten().tolist() == [7.0, -7.0, 1.0, 0.0]  # 448 x 2^-6


@pytest.mark.parametrize("broken", [math.inf, math.nan, 3e38])
def test_a_broken_prompt_leaves_a_usable_scale(broken: float) -> None:
    numbers = fp8()
    numbers.calibrate(0, rows([broken, 1.0], [1.0, 2.0]), rows([1.0, 1.0], [1.0, 1.0]))
    assert numbers.key_scales.isfinite().all() and (numbers.key_scales > 0).all()
    read, _ = numbers.round_trip(0, rows([1e30, -math.inf], [1.0, 2.0]), rows([1.0, 1.0], [1.0, 1.0]))
    assert read.isfinite().all()


def test_codes_take_a_byte() -> None:
    numbers = fp8()
    codes, _ = numbers.pack(0, torch.randn(3, 1, 2, 4), torch.randn(3, 1, 2, 4))
    assert (codes.dtype, codes.shape, numbers.storage) == (torch.uint8, (3, 1, 2, 4), torch.uint8)


def test_every_code_is_read_as_torch_reads_it() -> None:
    """Also when they are a part of a larger tensor."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    numbers, doubled = fp8(), torch.cat((codes, codes), 2)
    expected = codes.view(FP8).float()
    assert expected.isnan().sum() == 2
    for part in (codes, doubled[:, :, 8:]):
        for read in numbers.unpack(0, part, part):
            assert torch.equal(read.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    finite = codes[:, :, :7]
    assert torch.equal(numbers.unpack(0, finite, finite)[0], finite.view(FP8).float())
