"""The kernels over pages compile for Hopper, onto its tensor cores, with loads that overlap them. Needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest
import torch

from tests.support.compiling import SHARED_MEMORY, Compiled, compile_for_hopper, kind_of_call

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled"),
]
SHAPE = {"PAGE": 64, "BLOCK_K": 64}
MODELS = pytest.mark.parametrize(
    ("share", "groups", "width", "codes"),
    [
        pytest.param(7, 4, 128, False, id="7B"),
        pytest.param(7, 4, 128, True, id="7B-fp8"),
        pytest.param(7, 2, 64, False, id="0.5B", marks=pytest.mark.long),
        pytest.param(16, 1, 256, False, id="wide", marks=pytest.mark.long),
        pytest.param(16, 1, 256, True, id="wide-fp8", marks=pytest.mark.long),
    ],
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def pointers(codes: bool) -> dict[str, str]:
    stored = "*fp8e4nv" if codes else "*bf16"
    fp32 = dict.fromkeys(("key_scales", "value_scales", "parts", "maxima", "sums"), "*fp32")
    integers = dict.fromkeys(("table", "cu_seqlens", "items", "count"), "*i32")
    positions = dict.fromkeys(("positions", "first_positions"), "*i64")
    numbers = {"query": "*bf16", "out": "*bf16", "sinks": "*bf16", "keys": stored, "values": stored}
    return numbers | {"scale": "fp32", "log2_e": "fp32"} | fp32 | integers | positions


def without_scales(codes: bool) -> dict[str, None]:
    return {} if codes else dict.fromkeys(("key_scales", "value_scales"))


SINKS = pytest.mark.parametrize(
    "sinks", [{"sinks": None, "WINDOW": None}, {"WINDOW": 128}], ids=["", "sinks and windows"]
)
WINDOWS = pytest.mark.parametrize("window", [{"WINDOW": None}, {"WINDOW": 128}], ids=["", "windows"])


def in_flight(made: Compiled) -> int:
    """Groups of loads that are still under way when the loop goes on with a block."""
    return max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+);", made.ptx)))


@MODELS
@WINDOWS
def test_decode(share, groups, width, codes, window):
    from megatron_rl.models.attention.kernels import PROGRAMS_PER_PROCESSOR, STAGES, splits_kernel

    constants = SHAPE | {"SHARE": share, "GROUPS": groups, "WIDTH": width, "BLOCK_D": width}
    constants |= {"SPLIT": 256, "SPLITS": 64, "PAGES": 4, "BLOCK_Q": 16} | without_scales(codes) | window
    made = compile_for_hopper(splits_kernel, pointers(codes), constants, num_warps=4, num_stages=STAGES)
    assert (".f16.f16.f32" if codes else ".bf16.bf16.f32") in made.ptx
    if codes:  # whole words are read, and become fp16 in one instruction
        assert "ld.shared.b8" not in made.ptx
        assert "cvt.rn.f16x2.e4m3x2" in made.ptx and "cvt.bf16.f16" not in made.ptx
    assert in_flight(made) == 2, "the next block's keys and values"
    assert made.resources.spilled == 0
    assert made.shared <= SHARED_MEMORY
    assert width > 128 or made.programs_at_once >= PROGRAMS_PER_PROCESSOR


@SINKS
def test_sum(sinks):
    from megatron_rl.models.attention.kernels import sum_kernel

    constants = {"WIDTH": 128, "SPLIT": 256, "SPLITS": 64, "BLOCK_S": 16, "BLOCK_D": 128} | sinks
    made = compile_for_hopper(sum_kernel, pointers(False), constants, num_warps=2)
    assert "ex2" in made.ptx
    assert made.resources.spilled == 0


@WINDOWS
def test_find(window):
    from megatron_rl.models.attention.kernels import find_kernel

    made = compile_for_hopper(find_kernel, pointers(False), {"SPLIT": 256, "SPLITS": 64, "BLOCK": 256} | window)
    assert made.resources.spilled == 0


@MODELS
@SINKS
def test_extend(share, groups, width, codes, sinks):
    from megatron_rl.models.attention.kernels import STAGES, TILE, extend_kernel, warps_for

    constants = SHAPE | {"SHARE": share, "GROUPS": groups, "WIDTH": width, "BLOCK_D": width, "BLOCK_Q": TILE}
    made = compile_for_hopper(
        extend_kernel, pointers(codes), constants | without_scales(codes) | sinks,
        num_warps=warps_for(width), num_stages=STAGES,
    )  # fmt: skip
    assert "wgmma.mma_async" in made.ptx
    assert in_flight(made) == 2, "the next block's keys and values"
    assert made.resources.spilled == 0
    assert made.shared <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("kernel", "unaligned"),
    [
        ("find_kernel", {"positions": 72}),
        ("splits_kernel", {"positions": 72, "key_scales": 68, "value_scales": 72, "maxima": 68, "sums": 76}),
        ("sum_kernel", {"positions": 72, "maxima": 68, "sums": 76, "sinks": 66}),
        ("extend_kernel", {"first_positions": 72, "key_scales": 68, "value_scales": 72, "sinks": 66}),
    ],
)
def test_a_pointer_in_the_middle_of_a_buffer_needs_no_second_kernel(kernel, unaligned):
    """A row of a table of positions, a layer's scales: some are at multiples of 16 bytes, some are not."""
    from megatron_rl.models.attention import kernels

    kernel = getattr(kernels, kernel)
    types = pointers(codes=False)
    assert kind_of_call(kernel, types, unaligned) == kind_of_call(kernel, types)
    if "query" in kernel.arg_names:
        assert kind_of_call(kernel, types, {"query": 68}) != kind_of_call(kernel, types), "this test would see it"
