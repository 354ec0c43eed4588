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
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
ROUNDS_TO_E4M3 = "cvt.rn.satfinite.e4m3x2.f32"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(text: str, sink: str) -> None:
    assert (ROUNDS_TO_E4M3 in text) == (sink in ("fp8", "segments"))
    assert "ld.local" not in text and "st.local" not in text, "numbers are spilt to memory"


def both(kernel, types: dict[str, str], constants: dict[str, object], **options) -> list[str]:
    """As training launches it, and as a decode step does with dependent launches."""
    off, on = {"PDL": False}, {"PDL": True}
    return [
        compiled(kernel, types, constants | off, **options)[0],
        compiled(kernel, types, constants | on, launch_pdl=True, **options)[0],
    ]


def check_order(plain: str, dependent: str) -> None:
    """The wait comes before every access of global memory; nothing else changes."""
    assert WAIT not in plain and LAUNCH not in plain
    places = [dependent.index(name) for name in (WAIT, LAUNCH)]
    accesses = [dependent.find(name) for name in ("ld.global", "st.global", "cp.async")]
    first = min(place for place in accesses if place >= 0)
    assert places[0] < places[1] < first, "memory is read or written before the kernel ahead has ended"
    assert dependent.count(WAIT) == dependent.count(LAUNCH) == 1


@pytest.mark.parametrize(
    ("sink", "block"), [("numbers", 4096), ("fp8", 8192), ("int8", 4096), ("smoothed", 8192), ("segments", 8192)]
)
def test_residual_and_norm(sink, block):
    from megatron_rl.models.kernels import add_norm_kernel

    pointers, constants = SINKS[sink]
    types = dict.fromkeys(("residual", "output", "summed", "weight"), "*bf16") | {"scales": "*fp32", "epsilon": "fp32"}
    constants = constants | {"bias": None, "POWER_OF_TWO": False, "BLOCK": block}
    text, dependent = both(add_norm_kernel, types | pointers, constants, num_warps=min(block // 512, 16))
    check(text, sink)
    check_order(text, dependent)


@pytest.mark.parametrize("sink", SINKS)
def test_gate(sink):
    from megatron_rl.models.kernels import gate_kernel, two_powers

    pointers, constants = SINKS[sink]
    block, rest = (1024, 0) if sink in ("numbers", "segments") else two_powers(18_944)
    constants = constants | {"POWER_OF_TWO": True, "BLOCK": block, "REST": rest}
    for shares in (None, "*fp32"):  # with them the rows are experts'
        types = {"inner": "*bf16", "scales": "*fp32"} | pointers | ({"shares": shares} if shares else {})
        given = constants | ({} if shares else {"shares": None})
        text, dependent = both(gate_kernel, types, given, num_warps=min(block // 512, 16))
        check(text, sink)
        check_order(text, dependent)


@pytest.mark.parametrize("width", [4864, 18_944, 27_648 // 8])
def test_gradient_of_the_gate(width):
    from megatron_rl.models.kernels import gate_gradient_kernel

    types, sixteens = dict.fromkeys(("inner", "grad", "out"), "*bf16"), ["columns"] * (width % 16 == 0)
    made = compile_for_hopper(gate_gradient_kernel, types, {"BLOCK": 1024}, sixteens, num_warps=4)
    assert made.resources.spilled == 0 and made.programs_at_once >= 8
    assert made.ptx.count("ld.global.v4.b32") == 3 and made.ptx.count("st.global.v4.b32") == 2, "8 numbers at a time"


@pytest.mark.parametrize(("experts", "top_k", "over_all"), [(128, 8, False), (60, 6, True), (512, 10, False)])
def test_the_choice_of_experts(experts, top_k, over_all):
    from megatron_rl.models.expert_kernels import route_kernel

    block, slots = (1 << (number - 1).bit_length() for number in (experts, top_k))
    types = {"logits": "*fp32", "shares": "*fp32", "chosen": "*i32"}
    constants = {"bias": None, "TOP_K": top_k, "SLOTS": slots, "BLOCK": block, "OVER_ALL": over_all}
    text, _ = compiled(route_kernel, types, constants, num_warps=max(block // 128, 1))
    check(text, "numbers")


@pytest.mark.parametrize(
    ("sorted_by_torch", "sink"), [*((False, sink) for sink in SINKS), (True, "numbers"), (True, "segments")]
)
def test_tokens_to_their_experts(sink, sorted_by_torch):
    """Qwen3-30B-A3B's."""
    from megatron_rl.models.expert_kernels import dispatch_kernel

    pointers, constants = SINKS[sink]
    types = dict.fromkeys(("shares", "row_shares", "scales"), "*fp32")
    types |= dict.fromkeys(("chosen", "ends", "places", "known"), "*i32") | {"tokens": "*bf16"} | pointers
    constants = constants | {"POWER_OF_TWO": False, "TOP_K": 8, "SLOTS": 8, "CHUNK": 128, "BLOCK": 2048}
    if not sorted_by_torch:
        constants["known"] = types.pop("known") and None
    text, _ = compiled(dispatch_kernel, types, constants, num_warps=4)
    check(text, sink)


@pytest.mark.parametrize("places", ["*i32", "*i64"], ids=["rollouts", "training"])
def test_sums_of_experts(places):
    from megatron_rl.models.expert_kernels import combine_kernel

    types = {"output": "*bf16", "summed": "*bf16", "places": places}
    text, _ = compiled(combine_kernel, types, {"TOP_K": 8, "BLOCK": 1024}, num_warps=4, sixteens=("columns", "stride"))
    check(text, "numbers")
    assert text.count("ld.global.v4") >= 8 and "atom" not in text


@pytest.mark.parametrize(
    ("codes", "normed", "biased"), [(False, False, False), (True, True, False), (False, False, True)]
)
def test_rotation_and_cache(normed, codes, biased):
    from megatron_rl.models.kernels import rotate_store_kernel

    stored, scales = ("*u8", "*fp32") if codes else ("*bf16", None)
    types = dict.fromkeys(("mixed", "cos", "sin", "query"), "*bf16") | {"cells": "*i64", "epsilon": "fp32"}
    types |= dict.fromkeys(("keys", "values"), stored)
    constants = {"SHARE": 7, "WIDTH": 128, "HALF": 64, "HEADS": 16, "BLOCK": 128}
    for names, kind in ((("key_scales", "value_scales"), scales), (("query_norm", "key_norm"), "*bf16" * normed),
                        (("bias",), "*bf16" * biased)):  # fmt: skip
        types |= dict.fromkeys(names, kind) if kind else {}
        constants |= {} if kind else dict.fromkeys(names)
    text, dependent = both(rotate_store_kernel, types, constants, num_warps=4)
    check(text, "fp8" if codes else "numbers")
    check_order(text, dependent)
