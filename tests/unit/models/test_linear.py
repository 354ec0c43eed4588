"""The linear layers of a whole model against megatron's own on the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.models.rollout_ops import (
    WIDE,
    ColumnParallelLinear,
    RowParallelLinear,
    WholeColumnLinear,
    WholeRowLinear,
    call_linear,
    call_without_bias,
    rollout_product,
)
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.copies import QuantizedLinear
from megatron_rl.registry import RECIPES
from tests.support.tiny import tiny_config, tiny_policy

STOCK = {WholeColumnLinear: ColumnParallelLinear, WholeRowLinear: RowParallelLinear}


def linears(**changes: object) -> list[torch.nn.Module]:
    """Those of one layer, with biases that are not 0."""
    layer = tiny_policy(tiny_config(**changes)).gpt.decoder.layers[0]
    attention, mlp = layer.self_attention, layer.mlp
    found = [attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2]
    for module in found:
        if module.bias is not None:
            torch.nn.init.normal_(module.bias)
    return found


def run(module: torch.nn.Module, kind: type, tokens: Tensor) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Output, bias left to the caller, and the gradients of input, weight and bias."""
    leaf = tokens.clone().requires_grad_()
    output, bias = kind.forward(module, leaf)
    total = output if bias is None else output + bias
    inputs = [leaf, *module.parameters()]
    return output.detach(), bias, list(torch.autograd.grad((total * total.detach().cos()).sum(), inputs))


@pytest.mark.parametrize("changes", [{}, {"disable_bias_linear": False}, {"add_qkv_bias": False}])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_equals_stock(one_rank: ParallelGroups, changes: dict[str, bool], num_tokens: int) -> None:
    for module in linears(**changes):
        tokens = torch.randn(num_tokens, 1, module.input_size)
        output, bias, gradients = run(module, type(module), tokens)
        expected, expected_bias, expected_gradients = run(module, STOCK[type(module)], tokens)
        assert torch.equal(output, expected)
        assert bias is expected_bias
        for own, other in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(own, other)


def test_biases_are_put_where_stock_puts_them(one_rank: ParallelGroups) -> None:
    """The query-key-value bias is added at once, the others are left to a later step."""
    biases = [module(torch.randn(2, 1, module.input_size))[1] for module in linears(disable_bias_linear=False)]
    assert [bias is None for bias in biases] == [True, False, False, False]


@pytest.mark.parametrize("recipe", [None, "int8"])
@pytest.mark.parametrize("kind", [WholeColumnLinear, ColumnParallelLinear])
def test_a_kernel_may_add_the_bias(one_rank: ParallelGroups, kind: type, recipe: str | None) -> None:
    module, *_ = linears()
    module.__class__ = kind
    if recipe is not None:
        copy = QuantizedLinear("linear_qkv", module, RECIPES.get(recipe))
        copy.recipe.encode(copy.parameter, copy.weight)
        copy.install()
    tokens = torch.randn(3, module.input_size)
    with torch.inference_mode():
        whole, none = call_linear(module, tokens)
        product, bias = call_without_bias(module, tokens)
        after, still_none = call_linear(module, tokens)
        assert bias is module.bias and none is still_none is None
        assert torch.equal(product + bias, whole) and torch.equal(after, whole)
        hook = module.register_forward_hook(lambda *_: None)
        output, left = call_without_bias(module, tokens)
        assert left is None and torch.equal(output, whole), "hooks see the whole output"
        hook.remove()
        module.adapter = torch.nn.Identity()
        output, left = call_without_bias(module, tokens)
        assert left is None and torch.equal(output, whole), "an adapter's output is added to that with the bias"


def test_several_tensor_parallel_ranks_keep_the_stock_layers(one_rank: ParallelGroups) -> None:
    from megatron_rl.models.gpt import build_transformer_config
    from megatron_rl.models.spec import layer_spec
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.megatron import submodules_of

    for ranks, whole in ((1, True), (2, False)):
        config = tiny_config(ranks, tensor_model_parallel_size=ranks)
        layer = layer_spec(build_transformer_config(config, current_platform()))
        attention, mlp = layer.submodules.self_attention.submodules, submodules_of(layer.submodules.mlp)
        used = {attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2}
        assert used == (set(STOCK) if whole else set(STOCK.values()))


@pytest.mark.parametrize("rows", [4, 7, 64])
@pytest.mark.parametrize("columns", [WIDE, WIDE + 1, 2 * WIDE, 2 * WIDE - 40])
def test_a_wide_product_in_strips_has_the_same_bits(one_rank: ParallelGroups, rows: int, columns: int) -> None:
    """Rollouts multiply in strips, training does not."""
    changes = {"hidden_size": 512, "ffn_hidden_size": columns, "swiglu": False}
    module = tiny_policy(tiny_config(**changes)).gpt.decoder.layers[0].mlp.linear_fc1
    tokens = torch.randn(rows, 512)
    with torch.inference_mode():
        strips, _ = module(tokens)
    whole, _ = module(tokens)
    assert whole.requires_grad
    assert torch.equal(strips, whole)


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize(("vocabulary", "width"), [(50257, 96), (151936, 64), (49152, 576), (WIDE, 32)])
def test_the_logits_of_published_vocabularies_have_the_same_bits(rows: int, vocabulary: int, width: int) -> None:
    """Rollouts multiply by the output layer in strips, training does not."""
    hidden, weight = torch.randn(rows, width), torch.randn(vocabulary, width)
    assert torch.equal(rollout_product(hidden, weight), hidden @ weight.t())
