"""The kernels of a layer in training compile for Hopper, in registers. Needs no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.support.compiling import compile_for_hopper

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled"),
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("alone", [False, True], ids=["", "norm alone"])
@pytest.mark.parametrize("hidden", [896, 3584, 5120])
def test_gradient_of_residual_and_norm(hidden, alone):
    from megatron_rl.models.training_kernels import norm_gradient_kernel

    block = 1 << (hidden - 1).bit_length()
    types = dict.fromkeys(("summed", "of_sum", "of_normed", "weight", "out"), "*bf16")
    types |= {"sums": "*fp32", "epsilon": "fp32"}
    constants = {"BLOCK": block} | ({"of_sum": None} if alone else {})
    made = compile_for_hopper(norm_gradient_kernel, types, constants, ["columns"], num_warps=block // 512)
    assert made.resources.spilled == 0 and "atom" not in made.ptx
    assert made.ptx.count("ld.global.v4.b32") >= 3, "8 numbers at a time"


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(("share", "width"), [(7, 64), (7, 128), (5, 128), (4, 128)])
def test_gradient_of_heads(share, width, normed):
    """Heads of Qwen2.5-0.5B, 7B and 32B, and of Qwen3-8B."""
    from megatron_rl.models.training_kernels import heads_gradient_kernel

    heads = 1 << (share + 1).bit_length()
    types = dict.fromkeys(("of_query", "of_key", "of_value", "cos", "sin", "out"), "*bf16") | {"epsilon": "fp32"}
    constants = {"SHARE": share, "WIDTH": width, "HEADS": heads, "BLOCK": width}
    if normed:
        types |= dict.fromkeys(("mixed", "query_norm", "key_norm"), "*bf16") | {"sums": "*fp32"}
    else:
        constants |= dict.fromkeys(("mixed", "query_norm", "key_norm", "sums"))
    made = compile_for_hopper(heads_gradient_kernel, types, constants, num_warps=min(heads * width // 512, 8))
    assert made.resources.spilled == 0 and "atom" not in made.ptx
    assert made.programs_at_once >= 7
