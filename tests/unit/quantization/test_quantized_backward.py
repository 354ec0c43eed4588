"""The quantised backward pass of aligned training: dX from Q(dY) and Q(W), dW from Q(dY) and Q(X)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms import TokenBatch
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization import formats
from megatron_rl.quantization.copies import QuantizedLinear
from megatron_rl.quantization.formats import TILE
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.quantization.recipe import PackedActivations
from megatron_rl.quantization.recipes import fp8_block
from megatron_rl.registry import RECIPES
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.quantized import QUANTIZING, quantizable_policy
from tests.support.samples import random_samples

pytestmark = pytest.mark.usefixtures("one_rank")
FC2 = "layers.0.mlp.linear_fc2"
PRODUCT_ERROR = {"int8": 0.025, "fp8": 0.06}
"""Relative error of one product of Gaussian numbers in fp64, by the first word of the recipe's format."""
MODEL_ERROR = {"int8": 0.07, "fp8": 0.28}
"""Of a parameter's gradient through two layers, whose roundings add up; the forward pass is quantised too."""
BACKWARD_ERROR = {"int8": 0.04, "fp8": 0.12}
"""The part of it that the backward pass adds."""


def of_format(bounds: dict[str, float], recipe: str) -> float:
    return bounds[RECIPES.get(recipe).format.split()[0].rstrip(",")]


def relative(values: Tensor, exact: Tensor) -> float:
    return float((values.double() - exact).norm() / exact.norm())


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(policy: PolicyModel, recipe: str) -> QuantizedLinear:
    linears = QuantizedLinears(policy.gpt, RECIPES.get(recipe), quantizes_gradients=True)
    linears.refresh()
    return next(layer for layer in linears.layers if layer.name == FC2)


def test_by_hand() -> None:
    """INT8: a scale a token of dY and an input of W for dX; a channel over all tokens of dY and of X for dW."""
    layer = layer_of(quantizable_policy(), "int8")
    weight = layer.module.weight
    with torch.no_grad():
        weight.zero_()
        weight[:2, :2] = torch.tensor([[127.0, 10.4], [2.6, 254.0]])
    layer.recipe.encode(weight.detach(), layer.weight)
    x = torch.zeros(2, 1, layer.weight.columns)
    x[:, 0, :2] = torch.tensor([[127.0, 2.0], [1.4, -254.0]])
    x.requires_grad_()
    product, _ = layer.forward(x)
    slopes = torch.zeros_like(product)
    slopes[:, 0, :2] = torch.tensor([[127.0, 3.3], [-254.0, 1.0]])
    product.backward(slopes)
    # W by input: [127, 3] at scale 1, [10.4, 254] at scale 2 -> [10, 254]. dY by token: [127, 3] and [-254, 1] -> 2 x
    # [-127, 0] (1 / 2 rounds to even).
    wanted = [[127 * 127 + 3 * 3, 127 * 10 + 3 * 254], [-254 * 127, -254 * 10]]
    torch.testing.assert_close(x.grad[:, 0, :2], torch.tensor(wanted, dtype=torch.float32))
    # dY by output: [127, -254] at scale 2 -> 2 x [64, -127] (63.5 to even), [3.3, 1] at 3.3 / 127 -> [127, 38].
    # X by input: [127, 1.4] -> [127, 1], [2, -254] -> 2 x [1, -127].
    step = 3.3 / 127
    wanted = [[128 * 127 - 254 * 1, 128 * 2 + 254 * 254], [step * (127 * 127 + 38), step * (127 * 2 - 38 * 254)]]
    torch.testing.assert_close(weight.grad[:2, :2], torch.tensor(wanted))
    assert weight.grad[2:].abs().max() == 0


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_pow2"])
def test_blocks_are_tiles_of_the_weight_and_segments_of_tokens(name: str) -> None:
    recipe = RECIPES.get(name)
    weight, dy, x = numbers(256, 200, seed=1), numbers(300, 256, seed=2), numbers(300, 200, seed=3)
    weight[:128] *= 100
    dy[:, 128:] *= 50
    dy[:128] *= 20
    q = recipe.quantize(weight)

    def segments(values: Tensor) -> Tensor:
        """1 x 128, quantised by the definition of `formats`, in fp64."""
        cut = formats.segments(values)
        scale = formats.scale_of(formats.row_amax(cut), formats.FP8_MAX)
        scale = formats.power_of_two(scale) if recipe.powers_of_two else scale
        rounded = formats.fp8_codes(cut, scale).double() * scale.double()
        return rounded.flatten(1)[:, : values.shape[1]]

    of_input = segments(dy) @ recipe.dequantize(q).double()
    of_weight = segments(dy.t()) @ segments(x.t()).t()
    assert relative(recipe.input_gradient(dy, weight, q), of_input) < 1e-6
    assert relative(recipe.weight_gradient(dy, x), of_weight) < 1e-6
    assert relative(of_input, dy.double() @ weight.double()) > 1e-3, "nothing was quantised"


@pytest.mark.parametrize("tokens", [1, 129])
@pytest.mark.parametrize("name", QUANTIZING)
def test_products_are_near_those_in_float64(name: str, tokens: int) -> None:
    recipe, bound = RECIPES.get(name), of_format(PRODUCT_ERROR, name)
    weight, dy, x = numbers(96, 130, seed=1), numbers(tokens, 96, seed=2), numbers(tokens, 130, seed=3)
    q = recipe.quantize(weight)
    of_input, of_weight = recipe.input_gradient(dy, weight, q), recipe.weight_gradient(dy, x)
    assert relative(of_input, dy.double() @ weight.double()) < bound
    assert relative(of_weight, dy.double().t() @ x.double()) < bound
    assert recipe.input_gradient(dy.bfloat16(), weight.bfloat16(), q).dtype == torch.bfloat16
    dy[0, 3] = torch.nan
    assert not recipe.input_gradient(dy, weight, q)[0].isfinite().any()
    assert not recipe.weight_gradient(dy, x)[3].isfinite().any()


@pytest.mark.parametrize("name", QUANTIZING)
def test_gradients_of_a_model_are_near_those_in_float64(name: str, one_rank: ParallelGroups) -> None:
    policy, samples = quantizable_policy(), collate(random_samples(6), "cpu")
    policy.gpt.double()
    exact = gradients_of(policy, one_rank, samples)
    policy.gpt.float()
    found = {}
    for quantizes_gradients in (False, True):
        linears = QuantizedLinears(policy.gpt, RECIPES.get(name), quantizes_gradients=quantizes_gradients)
        with linears.installed():
            found[quantizes_gradients] = gradients_of(policy, one_rank, samples)
    through, quantised = found[False], found[True]
    linears = [name for name in exact if ".linear_" in name and name.endswith("weight")]
    for parameter in linears:
        error = relative(quantised[parameter], exact[parameter])
        assert error < of_format(MODEL_ERROR, name), f"{parameter}: {error:.3f}"
        added = relative(quantised[parameter], through[parameter].double())
        assert 0 < added < of_format(BACKWARD_ERROR, name), f"{parameter}: {added:.3f}"


def gradients_of(policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch) -> dict[str, Tensor]:
    scorer = Scorer(policy, groups, 1.0)
    scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs.sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.gpt.named_parameters()}
    policy.gpt.zero_grad()
    return found


def segments_product(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype):
    """``torch.nn.functional.scaled_mm`` of 1 x 128 by 1 x 128, with torch's checks and cuBLAS's, in fp64."""
    one = torch.nn.functional.ScalingType.BlockWise1x128
    assert (kind_a, kind_b) == (one, one)
    (rows, depth), columns = a.shape, b.shape[1]
    assert rows % 16 == columns % 16 == depth % 16 == 0
    assert b.stride() == (1, depth), "column by column"
    for scale, size in ((scale_a, rows), (scale_b, columns)):
        assert scale.shape == (size, -(-depth // TILE)) and scale.stride() == (1, size)
    wide = [scale.double().repeat_interleave(TILE, 1) for scale in (scale_a, scale_b)]
    return ((a.double() * wide[0]) @ (b.t().double() * wide[1]).t()).to(output_dtype)


def test_what_the_product_of_segments_is_given_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", segments_product)
    recipe, dy, x = RECIPES.get("fp8_block_pow2"), numbers(130, 48, seed=1), numbers(130, 96, seed=2)

    def pack(values: Tensor) -> PackedActivations:
        codes, scales = recipe.activation_codes(values)
        laid = torch.empty(scales.shape[1], len(scales)).copy_(scales[..., 0].t()).t()
        return PackedActivations(codes.flatten(1).to(formats.FP8), laid, torch.float32)

    product = fp8_block.segments_product(pack(dy.t()), pack(x.t()), torch.float32)
    torch.testing.assert_close(product, recipe.weight_gradient(dy, x), rtol=2**-8, atol=1e-5)
