"""SwiGLU in training: megatron's bits with less kept, and only where the gate is SwiGLU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from megatron.core.transformer.mlp import MLP

from megatron_rl.models.blocks.dense import GatedMLP, has_plain_swiglu, swiglu
from megatron_rl.models.gpt import build_transformer_config
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from tests.support.tiny import SHAPES, tiny_config, tiny_policy

TOKENS = 48


def mlp_of(**changes: object) -> GatedMLP:
    """Of a layer of hidden size 32 and width 40."""
    mlp = tiny_policy(tiny_config(hidden_size=32, ffn_hidden_size=40, **changes)).layers[0].mlp
    assert isinstance(mlp, GatedMLP)
    return mlp


def run(mlp: MLP, way: type[MLP], dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], int]:
    """Output and gradients of the ``forward`` of that class, and the numbers kept a token beside the input's."""
    tokens = torch.randn(TOKENS, 1, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    known = {x.untyped_storage().data_ptr() for x in (tokens, *mlp.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = way.forward(mlp, tokens)
    numbers = sum(kept.values()) // TOKENS
    slopes = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradients = torch.autograd.grad(output, (tokens, *mlp.parameters()), slopes, allow_unused=True)
    return [output, *(gradient for gradient in gradients if gradient is not None)], numbers


@pytest.mark.parametrize("changes", [{}, {"disable_bias_linear": False}], ids=["plain", "biased"])
def test_the_bits_of_megatron_with_three_fifths_kept(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    mlp = mlp_of(**changes)
    own, kept = run(mlp, GatedMLP)
    expected, megatrons = run(mlp, MLP)
    assert len(own) == len(expected) >= 4
    assert all(map(torch.equal, own, expected))
    assert (kept, megatrons) == (3 * 40, 5 * 40), "fc1's output, and the product that fc2 keeps"


def test_bf16_on_a_cpu_is_left_to_megatron(one_rank: ParallelGroups) -> None:
    mlp = mlp_of(bf16=True)
    (own, kept), (expected, megatrons) = (run(mlp, way, torch.bfloat16) for way in (GatedMLP, MLP))
    assert kept == megatrons == 5 * 40 and all(map(torch.equal, own, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [1, 7, 40, 129])
def test_the_bits_of_torch_at_any_width(width: int, dtype: torch.dtype) -> None:
    inner = 3 * torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    slopes, results = torch.linspace(-1, 2, 5 * width).view(5, width).to(dtype), []
    for way in (swiglu, lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]):
        leaf = inner.clone().requires_grad_()
        output = way(leaf)
        results.append((output, *torch.autograd.grad(output, leaf, slopes)))
    assert all(map(torch.equal, *results))


def test_the_gradient_against_differences() -> None:
    inner = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (inner,))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("activation_func_clamp_value", 0.1), ("glu_linear_offset", 1.0), ("activation_func", functional.gelu),
        ("gated_linear_unit", False),
    ],
)  # fmt: skip
def test_another_gate_is_left_to_megatron(one_rank: ParallelGroups, setting: str, value: object) -> None:
    mlp = mlp_of()
    plain, _ = run(mlp, GatedMLP)
    setattr(mlp.config, setting, value)
    assert not has_plain_swiglu(mlp.config)
    if setting == "gated_linear_unit":  # the second product would not fit
        return
    own, _ = run(mlp, GatedMLP)
    expected, _ = run(mlp, MLP)
    assert all(map(torch.equal, own, expected))
    assert not torch.equal(own[0], plain[0])


def test_a_scale_a_token_is_left_to_megatron(one_rank: ParallelGroups) -> None:
    mlp, tokens, scale = mlp_of(), torch.randn(TOKENS, 1, 32), torch.linspace(0.1, 0.9, TOKENS)[:, None]
    assert torch.equal(mlp(tokens, per_token_scale=scale)[0], MLP.forward(mlp, tokens, per_token_scale=scale)[0])


def test_which_families_have_it() -> None:
    settings = {
        name: build_transformer_config(tiny_config(**changes), current_platform()) for name, changes in SHAPES.items()
    }
    fused = {name for name, config in settings.items() if has_plain_swiglu(config)}
    assert "grouped, gated, untied" in fused and not {"gelu", "windows"} & fused
