"""How many kernels a layer launches in training, forward and backward: at ragged lengths the host sets the pace."""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_rl.models import gradients
from megatron_rl.models.attention.backend import PackedKernel
from megatron_rl.models.attention.plan import PackedPlan
from megatron_rl.models.gpt import PolicyModel
from tests.support.launches_counted import counted
from tests.support.meta import META
from tests.support.tiny import tiny_config, tiny_policy
from tests.unit.models.test_rollout_launches import MODELS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


class _Attention(torch.autograd.Function):
    """One operator forward and one backward, as torch's flash attention has."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.exp(query)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = ctx.saved_tensors
        torch.exp(grad)
        return tuple(map(torch.empty_like, (query, key, value)))


class _Norm(torch.autograd.Function):
    """One kernel forward and two backward, as torch's RMSNorm has on CUDA; on the meta device it is in pieces."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(numbers, weight)
        return torch.rsqrt(numbers)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rsqrt(grad), torch.rsqrt(ctx.saved_tensors[1])


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: object) -> torch.Tensor:
    """As `backends/varlen.py`."""
    return _Attention.apply(query.squeeze(1), key.squeeze(1), value.squeeze(1)).flatten(1)[:, None]


def meta_plan(policy: PolicyModel) -> PackedPlan:
    """Of 6 tokens in 2 sequences; takes the model's values."""
    policy.gpt.to(META).train()
    rope = copy.copy(policy.ropes["main"])
    rope.cos, rope.sin = rope.cos.to(META), rope.sin.to(META)
    borders = torch.zeros(3, dtype=torch.int32, device=META)
    positions = torch.zeros(6, dtype=torch.int64, device=META)
    kernel = PackedKernel(lambda *_: None, attend)
    return PackedPlan.build((2, 4), borders, positions, {"main": rope}, policy.dtype, kernel)


def launches(layers: int, changes: dict[str, Any]) -> Counter[str]:
    policy = tiny_policy(tiny_config(bf16=True, num_layers=layers, **changes))
    plan = meta_plan(policy)
    for parameter in policy.gpt.parameters():
        add_to = torch.zeros_like(parameter, dtype=torch.float32)

        def as_megatrons(given: torch.Tensor, add_to: torch.Tensor = add_to) -> None:
            """What the hook of megatron's DDP does."""
            add_to.add_(given.grad)
            given.grad = None

        parameter.register_post_accumulate_grad_hook(as_megatrons)
    ids = torch.zeros(1, 6, dtype=torch.int64, device=META)
    with pytest.MonkeyPatch.context() as patch, counted() as seen:
        patch.setattr(gradients.functional, "rms_norm", lambda numbers, _, weight, __: _Norm.apply(numbers, weight))
        policy.gpt(ids, ids, None, packed_seq_params=plan).float().backward(torch.empty(1, 6, 32, device=META))
    return seen


def test_kernels_wait_for_the_weights_of_norms(one_rank: object) -> None:
    """With `--overlap-param-gather` hooks ahead of each module wait for its parameters."""
    policy = tiny_policy(tiny_config(bf16=True, num_layers=1, **MODELS["normed"]))
    plan, waited = meta_plan(policy), Counter[str]()
    for name, module in policy.gpt.decoder.layers[0].named_modules():
        if name.endswith("layernorm"):
            module.register_forward_pre_hook(lambda *_, name=name: waited.update([name]))
    ids = torch.zeros(1, 6, dtype=torch.int64, device=META)
    with counted() as seen:
        policy.gpt(ids, ids, None, packed_seq_params=plan)
    assert seen["add_norm_kernel"] == 3 and seen["rotate_store_kernel"] == 1, "of the layer, and the last norm"
    assert not {"rms_norm", "addcmul"} & seen.keys(), seen
    norms = ("input_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm")
    assert waited == dict.fromkeys(norms, 1)


def of_a_layer(changes: dict[str, Any]) -> Counter[str]:
    """What a pass launches once drops out."""
    return launches(3, changes) - launches(2, changes)


@pytest.mark.parametrize("model", ["biased", "normed"])
def test_a_layer_launches_few_kernels(one_rank: object, model: str) -> None:
    """In eager torch there are 49 and 54. Attention's backward counts once, though it is several kernels."""
    seen = of_a_layer(MODELS[model])
    assert seen.total() <= 37, seen
    assert seen["mm"] == 12 and seen["add_"] == (7 if model == "biased" else 8), "gradient buffers"
    ours = ("add_norm", "norm_gradient", "rotate_store", "heads_gradient", "gate", "gate_gradient")
    assert [seen[f"{name}_kernel"] for name in ours] == [2, 2, 1, 1, 1, 1]
