"""How many kernels a layer launches in a decode step: beside a few microseconds of work each costs about two."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch

from megatron_rl.models.rollout import RolloutForward
from megatron_rl.models.rollout_ops import RolloutOps
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from tests.support.launches_counted import counted
from tests.support.meta import META, meta_context
from tests.support.tiny import tiny_config, tiny_policy

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

MODELS = {
    "biased": {},  # Qwen2.5
    "normed": {"qk_layernorm": True, "add_qkv_bias": False},  # Qwen3
}


def launches(layers: int, model: str, recipe: str, stored: torch.dtype | None, ops: RolloutOps) -> Counter[str]:
    policy = tiny_policy(tiny_config(bf16=True, num_layers=layers, **MODELS[model]))
    context = meta_context(policy, "triton_paged", ops, stored)
    forward = RolloutForward(policy, context)
    token, positions = torch.zeros(6, dtype=torch.int64, device=META), torch.zeros(1, 6, dtype=torch.int64, device=META)
    linears = None
    if recipe != "none":
        linears = QuantizedLinears(policy.gpt, RECIPES.get(recipe))
        for layer in linears.layers:
            layer.install()
    with torch.inference_mode(), counted() as seen:
        context.begin_decode(positions, 48)
        context.next_step()
        forward.chunk(0, token, positions[0])
    return seen


def of_a_layer(*case: object) -> Counter[str]:
    """What a step launches once drops out."""
    more, less = launches(3, *case), launches(2, *case)
    return more - less


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("recipe", "stored", "most"),
    [
        ("none", None, 12),
        ("fp8", None, 18),
        ("fp8_block", None, 18),
        ("int8", None, 18),
        ("fp8", torch.float8_e4m3fn, 20),
        ("none", torch.float8_e4m3fn, 14),
    ],
)
def test_a_layer_launches_few_kernels(
    one_rank: object, model: str, recipe: str, stored: torch.dtype | None, most: int
) -> None:
    seen = of_a_layer(model, recipe, stored, RolloutOps(fused=True))
    assert 8 <= seen.total() <= most, seen


def test_the_count_sees_what_is_fused(one_rank: object) -> None:
    fused, eager = (of_a_layer("normed", "fp8", None, ops) for ops in map(RolloutOps, (True, False)))
    assert eager.total() >= fused.total() + 10, (eager, fused)
    assert fused["rows_kernel"] == 1, "the projection's input is attention's; all others come quantised"
    assert eager["rows_kernel"] == 4
    assert not any(name in fused for name in ("cat", "index_copy_", "silu", "_fused_rms_norm", "rms_norm", "pow"))
