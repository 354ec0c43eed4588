"""Bytes and products of the measured models, worked out by hand and compared with real models."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_rl.models.gpt import build_model
from megatron_rl.platform import current_platform
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.registry import RECIPES
from tools.benchmark.common import Shape, benchmark_config
from tools.benchmark.on_gpu.measure import FULL, REHEARSAL
from tools.benchmark.on_gpu.shapes import (
    BF16,
    EXPERTS,
    FP8,
    FP8_KV,
    LARGE,
    MIDDLE,
    SMALL,
    decode_bytes,
    forward_flops,
    ratio,
    roofline_ms,
    share_of_experts,
    training_flops,
    utilisation,
    weight_bytes,
)

COPY_RATE = 4.3e12
HAND = Shape("by hand", hidden=8, ffn=16, layers=2, heads=4, groups=2, vocab=10)
# qkv (8 + 2 x 2 x 2) x 8, proj 8 x 8, gate and up 2 x 16 x 8, down 8 x 16
HAND_LINEARS = 2 * (16 * 8 + 8 * 8 + 32 * 8 + 8 * 16)


def test_a_decode_step_by_hand() -> None:
    assert HAND.linear_weights == HAND_LINEARS == 1152
    # keys and values of 2 layers, 2 groups, 2 wide; 3 rows of 5 tokens
    cache = 3 * 5 * (2 * 2 * 2 * 2)
    assert decode_bytes(HAND, BF16, 3, 5) == 2 * 1152 + 2 * 80 + 2 * cache
    scales = 4 * 2 * (16 + 8 + 32 + 8)
    assert decode_bytes(HAND, FP8, 3, 5) == 1152 + scales + 2 * 80 + 2 * cache
    assert decode_bytes(HAND, FP8_KV, 3, 5) == 1152 + scales + 2 * 80 + cache


def test_products_by_hand() -> None:
    # every weight twice a token; in each layer 8 numbers of a query meet 7 x 7 / 2 keys and as many values, twice
    attention = 2 * 2 * (2 * 8 * 7 * 7 // 2)
    assert forward_flops(HAND, [7], head=True) == 7 * 2 * (1152 + 80) + attention
    assert forward_flops(HAND, [7], head=False) == 7 * 2 * 1152 + attention
    assert training_flops(HAND, [7, 7]) == 6 * (7 * 2 * (1152 + 80) + attention)


@pytest.mark.parametrize(
    ("shape", "kind", "least", "expected"),
    [
        (MIDDLE, BF16, 3.73, 4.9),
        (MIDDLE, FP8, 2.21, 3.2),
        (MIDDLE, FP8_KV, 1.99, 2.9),
        (LARGE, BF16, 16.87, 21.1),
        (LARGE, FP8, 9.62, 12.7),
        (LARGE, FP8_KV, 8.62, 11.5),
    ],
)
def test_the_speed_model(shape: Shape, kind: object, least: float, expected: float) -> None:
    """``least`` is bytes at the copy rate; what the design expects of real kernels is 1.25 to 1.46 times that."""
    ours = roofline_ms(decode_bytes(shape, kind, 32, 1024), COPY_RATE)
    assert ours == pytest.approx(least, abs=0.01)
    assert 1.2 < expected / ours < 1.5


def test_sizes_of_the_models() -> None:
    """Published: 0.49, 7.6 and 32.5 thousand million parameters; embedding and head are one in the first."""
    for shape, published in ((SMALL, 0.49e9), (MIDDLE, 7.6e9), (LARGE, 32.5e9)):
        embeddings = shape.head_weights * (1 if shape.tied else 2)
        assert shape.linear_weights + embeddings == pytest.approx(published, rel=0.015)


def test_experts_that_no_token_comes_to_are_not_read() -> None:
    """Published: 30.5 thousand million parameters, of which 3.3 are a token's."""
    assert EXPERTS.linear_weights + 2 * EXPERTS.head_weights == pytest.approx(30.5e9, rel=0.015)
    assert weight_bytes(EXPERTS, BF16, 1) / 2 + EXPERTS.head_weights == pytest.approx(3.3e9, rel=0.03)
    assert share_of_experts(EXPERTS, 1) == 8 / 128
    assert share_of_experts(EXPERTS, 2) == pytest.approx(1 - (120 / 128) ** 2)
    assert share_of_experts(EXPERTS, None) == share_of_experts(MIDDLE, 1) == 1.0
    for kind, times in ((BF16, (1.43, 13.1, 20.0)), (FP8, (0.80, 7.0, 13.1))):
        found = [roofline_ms(decode_bytes(EXPERTS, kind, rows, 1024), COPY_RATE) for rows in (1, 32, 256)]
        assert found == pytest.approx(times, rel=0.02)
    assert FULL.experts.whole == EXPERTS and FULL.experts.layers == 8


def test_a_cut_model_remembers_the_whole() -> None:
    cut = LARGE.cut(16)
    assert cut.whole == LARGE and 4 * cut.linear_weights == LARGE.linear_weights
    assert LARGE.whole == LARGE
    assert FULL.large == cut


@pytest.mark.parametrize("shape", [REHEARSAL.small, REHEARSAL.middle])
def test_the_arithmetic_is_that_of_the_real_model(shape: Shape, one_rank: object) -> None:
    gpt = build_model(benchmark_config(shape, 16, "--bf16"), current_platform(), shape.vocab).gpt
    weights = {name: module.weight for name, module in parallel_linears(gpt).items()}
    assert sum(weight.numel() for weight in weights.values()) == shape.linear_weights
    head = gpt.shared_embedding_or_output_weight()
    plain = sum(weight.nbytes for weight in weights.values()) + head.nbytes
    assert weight_bytes(shape, BF16) == plain
    copies = QuantizedLinears(gpt, RECIPES.get("fp8")).stored_bytes
    assert weight_bytes(shape, FP8) == copies + head.nbytes
    assert (gpt.output_layer.weight is None) == shape.tied
    attention = gpt.decoder.layers[0].self_attention
    per_layer = 2 * attention.num_query_groups_per_partition * attention.hidden_size_per_attention_head
    assert shape.layout.cache_numbers(1) == shape.layers * per_layer


def test_what_is_not_known_has_no_ratio() -> None:
    assert roofline_ms(100, None) is None
    assert ratio(3.0, None) is None and utilisation(10, 1.0, None) is None
    assert ratio(3.0, 2.0) == 1.5
    assert utilisation(training_flops(HAND, [7]), 2.0, 1e6) == training_flops(HAND, [7]) / 2e6


def test_flags_give_the_sizes() -> None:
    model = benchmark_config(dataclasses.replace(MIDDLE, layers=1), 16).model
    assert (model.hidden_size, model.ffn_hidden_size, model.kv_channels) == (3584, 18944, 128)
    assert (model.num_query_groups, model.untie_embeddings_and_output_weights) == (4, True)
    assert not benchmark_config(SMALL, 16).model.untie_embeddings_and_output_weights
