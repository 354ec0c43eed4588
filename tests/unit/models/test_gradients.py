"""Gradients that are spelled out: autograd's numbers, with fewer passes over memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.models.gradients import rms_norm, rotate
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.support.samples import random_samples
from tests.support.tiny import tiny_config, tiny_policy

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_has_torchs_bits_and_gradients(dtype: torch.dtype) -> None:
    numbers, grad = torch.randn(6, 1, 4, 16).to(dtype), torch.randn(6, 1, 4, 16).to(dtype)
    weight = torch.rand(16).to(dtype)
    own = [each.clone().requires_grad_() for each in (numbers, weight)]
    normed = rms_norm(*own, 1e-3)
    assert torch.equal(normed, functional.rms_norm(numbers, (16,), weight, 1e-3)), "rollouts run torch's"
    exact = [each.double().requires_grad_() for each in (numbers, weight)]
    expected = torch.autograd.grad(functional.rms_norm(exact[0], (16,), exact[1], 1e-3), exact, grad.double())
    for actual, wanted in zip(torch.autograd.grad(normed, own, grad), expected, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("changes", [{}, {"rotary_percent": 0.5}], ids=["whole", "half"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotation_turns_its_gradient_back(
    one_rank: ParallelGroups, changes: dict[str, float], dtype: torch.dtype
) -> None:
    turn = tiny_policy(tiny_config(**changes)).ropes["main"].at(torch.tensor([0, 5, 47]), dtype)
    heads, grad = torch.randn(3, 1, 4, 8).to(dtype).requires_grad_(), torch.randn(3, 1, 4, 8).to(dtype)
    rotated = rotate(heads, *turn)
    with torch.no_grad():
        assert torch.equal(rotated, rotate(heads, *turn)), "rollouts record no gradient"
    assert not torch.allclose(rotated, heads)
    # What turns by an angle turns the gradient by the angle's negative: <grad, R x> = <R^T grad, x>.
    exact = heads.detach().double().requires_grad_()
    cos, sin = (each.double() for each in turn)
    width, half = cos.shape[-1], cos.shape[-1] // 2
    swapped = exact[..., [*range(half, width), *range(half)]]
    plain = torch.cat((exact[..., :width] * cos + swapped * sin, exact[..., width:]), -1)
    (wanted,) = torch.autograd.grad(plain, exact, grad.double())
    (actual,) = torch.autograd.grad(rotated, heads, grad)
    torch.testing.assert_close(actual.double(), wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype])


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation.overloadpacket._qualified_op_name] += 1
        return operation(*args, **(kwargs or {}))


def _operations(layers: int, groups: ParallelGroups, **changes: object) -> Counter[str]:
    """Of a forward and backward pass over one micro-batch."""
    policy = tiny_policy(tiny_config(num_layers=layers, qk_layernorm=True, **changes))
    scorer, batch = Scorer(policy, groups, 1.0), collate(random_samples(5), "cpu")
    with _Operations() as seen:
        scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs.sum().backward()
    return seen.counts


@pytest.mark.parametrize("changes", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_layer_fills_one_tensor_with_zeros(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    of_layer = _operations(2, one_rank, **changes)
    of_layer.subtract(_operations(1, one_rank, **changes))
    fills = ("slice_backward", "select_backward", "zeros", "zeros_like", "new_zeros", "zero_", "fill_")
    found = {name: of_layer[f"aten::{name}"] for name in fills if of_layer[f"aten::{name}"]}
    assert found == {"new_zeros": 1}, "only the gradient of attention's padded rows, of which padding has none"
    assert of_layer["aten::rsqrt"] + of_layer["aten::rsqrt_"] == 4, "the count sees the norms of a layer"
    assert of_layer["aten::pow"] <= 4, "autograd's gradient of a norm has two more each"
