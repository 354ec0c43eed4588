"""Aligned training differentiates the product of the dequantised numbers, as if rounding had slope 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.quantization.copies import QuantizedLinear
from tests.support.quantized import QUANTIZING, linears_of, quantizable_policy

pytestmark = pytest.mark.usefixtures("one_rank")
QKV, FC2 = "layers.0.self_attention.linear_qkv", "layers.0.mlp.linear_fc2"
"""A column-parallel one that has a bias and leaves adding it to itself, and a row-parallel one without."""


@pytest.fixture
def policy() -> PolicyModel:
    return quantizable_policy()


def layer_of(policy: PolicyModel, recipe: str, name: str) -> QuantizedLinear:
    linears = linears_of(policy, recipe)
    linears.refresh()
    return next(layer for layer in linears.layers if layer.name == name)


def activations(columns: int) -> Tensor:
    x = torch.randn(6, 2, columns, generator=torch.Generator().manual_seed(4))
    x[..., 3] *= 20
    return x


def loss_of(product: Tensor) -> Tensor:
    """Every output has another gradient."""
    slopes = torch.linspace(-1, 2, product.numel()).view_as(product)
    return (slopes * product).sum()


def test_by_hand(policy: PolicyModel) -> None:
    layer = layer_of(policy, "int8", FC2)
    with torch.no_grad():
        layer.module.weight.zero_()
        layer.module.weight[:2, :2] = torch.tensor([[127.0, -63.4], [2.0, 1.0]])
    layer.recipe.encode(layer.module.weight.detach(), layer.weight)
    x = torch.zeros(1, 1, layer.weight.columns)
    x[0, 0, :3] = torch.tensor([127.0, 1.4, 0.4])
    x.requires_grad_()
    product, bias = layer.forward(x)
    assert bias is None
    # Dequantised: the weight [[127, -63], [2, 128/127]], the input [127, 1, 0].
    assert product[0, 0, :2].tolist() == pytest.approx([127 * 127 - 63, 254 + 128 / 127])
    (3 * product[0, 0, 0] + 5 * product[0, 0, 1]).backward()
    assert x.grad[0, 0, :3].tolist() == pytest.approx([3 * 127 + 5 * 2, 3 * -63 + 5 * 128 / 127, 0])
    gradient = layer.module.weight.grad
    assert gradient[0, :3].tolist() == pytest.approx([3 * 127.0, 3.0, 0.0])
    assert gradient[1, :3].tolist() == pytest.approx([5 * 127.0, 5.0, 0.0])
    assert gradient[2:].abs().max() == 0


@pytest.mark.parametrize("name", [QKV, FC2])
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_gradients_are_those_of_the_dequantised_product(policy: PolicyModel, recipe: str, name: str) -> None:
    layer = layer_of(policy, recipe, name)
    if layer.weight.smoothing is not None:
        layer.weight.smoothing.uniform_(0.5, 2.0)
        layer.recipe.encode(layer.module.weight.detach(), layer.weight)
    x = activations(layer.weight.columns).requires_grad_()
    product, _ = layer.forward(x)
    loss_of(product).backward()

    seen = layer.recipe.round_trip(x.detach(), layer.weight).requires_grad_()
    weight = layer.recipe.dequantize(layer.weight).requires_grad_()
    twin = seen @ weight.t()
    if layer.module.bias is not None:
        twin = twin + layer.module.bias.detach()
    loss_of(twin).backward()
    torch.testing.assert_close(product, twin, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad, seen.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer.module.weight.grad, weight.grad, rtol=1e-5, atol=1e-4)
    # The comparison can fail: the plain product has other gradients.
    of_input, of_weight = plain_gradients(x.detach(), layer.module.weight.detach())
    assert not torch.allclose(x.grad, of_input, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(layer.module.weight.grad, of_weight, rtol=1e-5, atol=1e-4)


def plain_gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of input and weight in the plain product."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss_of(x @ weight.t()).backward()
    return x.grad, weight.grad


def test_the_bias_has_its_plain_gradient(policy: PolicyModel) -> None:
    layer = layer_of(policy, "int8", QKV)
    product, _ = layer.forward(activations(layer.weight.columns))
    slopes = torch.linspace(-1, 2, product.numel()).view_as(product)
    loss_of(product).backward()
    torch.testing.assert_close(layer.module.bias.grad, slopes.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_without_gradients_there_is_no_graph_and_the_same_product(policy: PolicyModel, recipe: str) -> None:
    layer = layer_of(policy, recipe, FC2)
    x = activations(layer.weight.columns)
    trained, _ = layer.forward(x)
    assert trained.requires_grad
    with torch.no_grad():
        plain, _ = layer.forward(x.clone().requires_grad_())
    with torch.inference_mode():
        inferred, _ = layer.forward(x)
    assert plain.grad_fn is None
    assert inferred.is_inference()
    assert torch.equal(plain, trained.detach())
    assert torch.equal(inferred, trained.detach())


def test_after_a_rollout_in_inference_mode_it_still_trains(policy: PolicyModel) -> None:
    linears = linears_of(policy)
    layer = linears.layers[0]
    x = activations(layer.weight.columns)
    with linears.installed():
        with torch.inference_mode():
            layer.module(x)
            linears.refresh()
        layer.module(x)[0].sum().backward()
    assert layer.module.weight.grad.abs().sum() > 0


def test_a_frozen_weight_or_input_gets_nothing(policy: PolicyModel) -> None:
    layer = layer_of(policy, "int8", FC2)
    layer.module.weight.requires_grad_(False)
    x = activations(layer.weight.columns)
    assert not layer.forward(x)[0].requires_grad
    x.requires_grad_()
    layer.forward(x)[0].sum().backward()
    assert layer.module.weight.grad is None
    assert x.grad is not None


def test_in_bf16_gradients_have_the_types_of_their_tensors() -> None:
    policy = quantizable_policy(bf16=True)
    layer = layer_of(policy, "int8", FC2)
    x = activations(layer.weight.columns).bfloat16().requires_grad_()
    layer.forward(x)[0].sum().backward()
    assert x.grad.dtype == layer.module.weight.grad.dtype == torch.bfloat16
