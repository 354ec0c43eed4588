"""The kernels between a layer's products compile for Hopper, in registers. Needs no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.support.compiling import compile_for_hopper, compiled

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled"),
]
SINKS = {
    "numbers": ({"out": "*bf16"}, {"scales": None, "smoothing": None, "SEGMENTS": False}),
    "fp8": ({"out": "*fp8e4nv"}, {"smoothing": None, "SEGMENTS": False}),
    "int8": ({"out": "*i8"}, {"smoothing": None, "SEGMENTS": False}),
    "smoothed": ({"out": "*i8", "smoothing": "*fp32"}, {"SEGMENTS": False}),
    "segments": ({"out": "*fp8e4nv"}, {"smoothing": None, "SEGMENTS": True}),
}
ROUNDS_TO_E4M3 = "cvt.rn.satfinite.e4m3x2.f32"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(text: str, sink: str) -> None:
    assert (ROUNDS_TO_E4M3 in text) == (sink in ("fp8", "segments"))
    assert "ld.local" not in text and "st.local" not in text, "numbers are spilt to memory"


@pytest.mark.parametrize(
    ("sink", "block"), [("numbers", 4096), ("fp8", 8192), ("int8", 4096), ("smoothed", 8192), ("segments", 8192)]
)
def test_residual_and_norm(sink, block):
    from megatron_rl.models.kernels import add_norm_kernel

    pointers, constants = SINKS[sink]
    types = dict.fromkeys(("residual", "output", "weight"), "*bf16") | {"scales": "*fp32", "epsilon": "fp32"}
    constants = constants | {"bias": None, "POWER_OF_TWO": False, "BLOCK": block}
    text, _ = compiled(add_norm_kernel, types | pointers, constants, num_warps=min(block // 512, 16))
    check(text, sink)


@pytest.mark.parametrize("sink", SINKS)
def test_gate(sink):
    from megatron_rl.models.kernels import gate_kernel

    pointers, constants = SINKS[sink]
    block = 1024 if sink in ("numbers", "segments") else 32768
    types = {"inner": "*bf16", "scales": "*fp32"} | pointers
    text, _ = compiled(
        gate_kernel, types, constants | {"POWER_OF_TWO": True, "BLOCK": block}, num_warps=min(block // 512, 16)
    )
    check(text, sink)


@pytest.mark.parametrize("width", [4864, 18_944, 27_648 // 8])
def test_gradient_of_the_gate(width):
    from megatron_rl.models.kernels import gate_gradient_kernel

    types, sixteens = dict.fromkeys(("inner", "grad", "out"), "*bf16"), ["columns"] * (width % 16 == 0)
    made = compile_for_hopper(gate_gradient_kernel, types, {"BLOCK": 1024}, sixteens, num_warps=4)
    assert made.resources.spilled == 0 and made.programs_at_once >= 8
    assert made.ptx.count("ld.global.v4.b32") == 3 and made.ptx.count("st.global.v4.b32") == 2, "8 numbers at a time"


@pytest.mark.parametrize(("codes", "normed"), [(False, False), (True, True)])
def test_rotation_and_cache(normed, codes):
    from megatron_rl.models.kernels import rotate_store_kernel

    stored, scales = ("*u8", "*fp32") if codes else ("*bf16", None)
    types = dict.fromkeys(("mixed", "cos", "sin", "query"), "*bf16") | {"cells": "*i64", "epsilon": "fp32"}
    types |= dict.fromkeys(("keys", "values"), stored)
    constants = {"SHARE": 7, "WIDTH": 128, "HALF": 64, "HEADS": 16, "HALF_BLOCK": 64, "REST_BLOCK": 1}
    for names, kind in ((("key_scales", "value_scales"), scales), (("query_norm", "key_norm"), "*bf16" * normed)):
        types |= dict.fromkeys(names, kind) if kind else {}
        constants |= {} if kind else dict.fromkeys(names)
    text, _ = compiled(rotate_store_kernel, types, constants, num_warps=4)
    check(text, "fp8" if codes else "numbers")
