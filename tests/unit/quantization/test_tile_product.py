"""What blockwise products are given on CUDA, with a stand-in that takes what cuBLAS and torch's checks of it take."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.quantization import formats
from megatron_rl.quantization.formats import TILE
from megatron_rl.quantization.recipe import QuantizedWeight
from megatron_rl.quantization.recipes import fp8_block
from megatron_rl.registry import RECIPES

SCALING = torch.nn.functional.ScalingType


def blockwise(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype):
    """``torch.nn.functional.scaled_mm`` of 1 x 128 by 128 x 128, in fp64."""
    (tokens, columns), segments = a.shape, -(-a.shape[1] // TILE)
    assert (kind_a, kind_b) == (SCALING.BlockWise1x128, SCALING.BlockWise128x128)
    assert tokens % 4 == 0, "cuBLAS: the scales' columns are padded to four tokens"
    assert scale_a.shape == (tokens, segments) and scale_a.stride() == (1, tokens)
    padded = -(-segments // 4) * 4
    assert scale_b.shape == (padded, b.shape[1] // TILE) and scale_b.stride() == (1, padded)
    x = a.double().unflatten(1, (segments, TILE)) * scale_a.double()[..., None]
    weight = b.t().double() * scale_b[:segments].t().repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:, :columns]
    return (x.flatten(1) @ weight.t()).to(output_dtype)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 130])
def test_any_number_of_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", blockwise)
    recipe, generator = RECIPES.get("fp8_block"), torch.Generator().manual_seed(tokens)
    q = recipe.quantize(torch.randn(200, 640, generator=generator))
    x = torch.randn(tokens, 640, generator=generator)
    operand = torch.nn.functional.pad(q.scales, (0, 3))
    on_cuda = QuantizedWeight(codes=q.codes, scales=q.scales, rows=q.rows, columns=q.columns, operand=operand)
    codes, scales = recipe.activation_codes(x)
    product = fp8_block.fp8_product(codes.flatten(1).to(formats.FP8), scales[..., 0], on_cuda, torch.float32)
    twin = recipe.round_trip(x, q) @ recipe.dequantize(q).t()
    torch.testing.assert_close(product, twin, rtol=2**-8, atol=1e-5)
