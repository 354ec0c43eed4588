"""Names and bytes of quantised linears, by hand; all of it without torch."""

from __future__ import annotations

import pytest

from megatron_rl.quantization.shapes import skipped, storage_of


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("fp8", 112 * 144 + 4 * 112),  # 100 x 130 in multiples of 16, a scale a row
        ("fp8_tensor", 112 * 144 + 4 * 112),  # the one scale is written to every row
        ("int8", 112 * 144 + 4 * 112),
        ("int8_smooth", 112 * 144 + 4 * 112 + 4 * 130),
        ("fp8_block", 128 * 256 + 4 * 1 * 2),
        ("fp8_block_pow2", 128 * 256 + 4 * 1 * 2),
    ],
)
def test_bytes_of_100_by_130(recipe: str, expected: int) -> None:
    assert storage_of(recipe).stored_bytes(100, 130) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.0.*", True), ("layers.1.*", False), ("*.linear_fc1", True), ("*.linear_fc2", False),
        ("first:1", True), ("first:0", False), ("last:3", False), ("last:4", True), ("layers.0.mlp.linear_fc1", True),
    ],
)  # fmt: skip
def test_a_pattern_skips_the_first_layers_fc1_of_four(pattern: str, expected: bool) -> None:
    assert skipped("layers.0.mlp.linear_fc1", [pattern], 4) == expected
