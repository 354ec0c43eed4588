"""The kernels over pages compile for Hopper, onto its tensor cores, with loads that overlap them. Needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter

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
    fp32 = dict.fromkeys(("key_scales", "value_scales", "parts", "maxima", "sums", "lse"), "*fp32")
    integers = dict.fromkeys(("table", "cu_seqlens", "items", "count", "counters"), "*i32")
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


def decode_of(share: int, groups: int, width: int, codes: bool, invariant: bool, **further: object) -> Compiled:
    from megatron_rl.models.attention.kernels import splits_kernel
    from megatron_rl.models.attention.tiles import STAGES, TILE, warps_for

    heads = 1 << (share - 1).bit_length()
    constants = SHAPE | {"SHARE": share, "GROUPS": groups, "WIDTH": width, "BLOCK_D": width, "SPLIT": 256, "SPLITS": 64}
    constants |= {"PAGES": 4, "BLOCK_Q": TILE if invariant else 16, "BLOCK_H": heads, "BLOCK_S": 8}
    return compile_for_hopper(
        splits_kernel, pointers(codes), constants | {"INVARIANT": invariant} | without_scales(codes) | further,
        num_warps=warps_for(width) if invariant else 4, num_stages=STAGES, enable_fp_fusion=not invariant,
    )  # fmt: skip


def extend_of(share: int, groups: int, width: int, codes: bool, invariant: bool, **further: object) -> Compiled:
    from megatron_rl.models.attention.extend import extend_kernel
    from megatron_rl.models.attention.tiles import INVARIANT_SPLIT, STAGES, TILE, warps_for

    constants = SHAPE | {"SHARE": share, "GROUPS": groups, "WIDTH": width, "BLOCK_D": width, "BLOCK_Q": TILE}
    constants |= {"SPLIT": INVARIANT_SPLIT if invariant else None}
    return compile_for_hopper(
        extend_kernel, pointers(codes), constants | without_scales(codes) | further,
        num_warps=warps_for(width), num_stages=STAGES, enable_fp_fusion=not invariant,
    )  # fmt: skip


PAGED = {"lse": None}
PACKED = {"PAGE": 1}


@MODELS
@SINKS
def test_decode(share, groups, width, codes, sinks):
    from megatron_rl.models.attention.kernels import PROGRAMS_PER_PROCESSOR

    made = decode_of(share, groups, width, codes, False, **sinks)
    assert (".f16.f16.f32" if codes else ".bf16.bf16.f32") in made.ptx
    if codes:  # whole words are read, and become fp16 in one instruction
        assert "ld.shared.b8" not in made.ptx
        assert "cvt.rn.f16x2.e4m3x2" in made.ptx and "cvt.bf16.f16" not in made.ptx
    assert in_flight(made) == 2, "the next block's keys and values"
    assert made.resources.spilled == 0
    assert made.shared <= SHARED_MEMORY
    assert width > 128 or made.programs_at_once >= PROGRAMS_PER_PROCESSOR


def test_the_last_program_of_a_row_sees_the_parts_of_all():
    """All threads have stored before one counts, which releases and acquires at the GPU's scope, and wait for it."""
    made = decode_of(7, 4, 128, False, False, sinks=None, WINDOW=None)
    order = re.findall(r"st\.global|bar\.sync|atom\.[\w.]+|ld\.global", made.ptx)
    at = order.index("atom.global.gpu.acq_rel.add.u32")
    assert order[at - 2 : at + 2] == ["st.global", "bar.sync", order[at], "bar.sync"]
    assert "ld.global.nc" not in made.ptx


@WINDOWS
def test_find(window):
    from megatron_rl.models.attention.kernels import find_kernel

    made = compile_for_hopper(find_kernel, pointers(False), {"SPLIT": 256, "SPLITS": 64, "BLOCK": 256} | window)
    assert made.resources.spilled == 0


@MODELS
@SINKS
def test_extend(share, groups, width, codes, sinks):
    made = extend_of(share, groups, width, codes, False, **PAGED | sinks)
    assert "wgmma.mma_async" in made.ptx
    assert in_flight(made) == 2, "the next block's keys and values"
    assert made.resources.spilled == 0
    assert made.shared <= SHARED_MEMORY


def arithmetic(ptx: str) -> tuple[Counter[str], Counter[str]]:
    """The instructions from the first matrix product to the last one, which belong to a block of keys, and the rest."""
    first, last = ptx.index("wgmma.mma_async"), ptx.rindex("wgmma.mma_async")
    end = ptx.index("\n", last)
    pattern = r"\b(?:wgmma\.mma_async|ex2|fma|mul|add|sub|max)\.[\w.]*f32[\w.]*|shfl[\w.]*"
    return tuple(Counter(re.findall(pattern, part)) for part in (ptx[first:end], ptx[:first] + ptx[end:]))


def order_of_sums(ptx: str) -> list[str]:
    """In which order a row's weights are added up, by their places in the registers of a matrix product."""
    made: dict[str, tuple[str, list[str]]] = {}
    found = []

    def written(register: str) -> str:
        name, given = made.get(register, ("", []))
        if name == "product":
            return given[0]
        if name == "add.rn.f32":
            return f"({written(given[0])} + {written(given[1])})"
        if name.startswith("shfl"):
            return f"lane {given[1]}: {written(given[0])}"
        return "".join(map(written, given)) if name.startswith(("ex2", "mul", "sub", "selp")) else ""

    for line in ptx.splitlines():
        if product := re.match(r"\s*wgmma\.mma_async\S*\s*\{([^}]*)\}", line):
            made |= {register: ("product", [str(place)]) for place, register in enumerate(product[1].split(","))}
        elif other := re.match(r"\s*(\S+)\s+(%\w+)(?:\|%p\d+)?,\s*(.*);", line):
            name, result, given = other[1], other[2], other[3].split(", ")
            if name == "fma.rn.f32" and made.get(given[2], ("",))[0] == "add.rn.f32":
                found.append(written(given[2]))
            made[result] = name, given
    return found


@pytest.mark.parametrize("width", [64, 128])
@SINKS
def test_invariant_kernels_compute_with_the_same_instructions(width, sinks):
    """Decode, extend over pages and extend of packed keys: the same products, sums in the same order, same folds."""
    from megatron_rl.models.attention.kernels import INVARIANT_PROGRAMS

    shape = 7, 4, width, False, True
    made = [decode_of(*shape, **sinks), extend_of(*shape, **PAGED | sinks), extend_of(*shape, **PACKED | sinks)]
    (decode, fold), *others = (arithmetic(one.ptx) for one in made)
    assert decode == others[0][0] == others[1][0]
    assert decode[f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"] >= 4
    orders = [order_of_sums(one.ptx) for one in made]
    assert len(orders[0]) == 2 and orders[0][0].count("+") == 63 and orders[0] == orders[1] == orders[2]
    if sinks["WINDOW"] is None:
        for found in (fold, others[0][1]):
            assert found["mul.rn.f32"] == found["fma.rn.f32"] > 8, "each number of a fold takes one of each"
    for one in made:
        assert not re.search(r"\b(mul|add|sub)\.(ftz\.)?f32", one.ptx), "what the assembler might contract"
        assert in_flight(one) == 2
        assert one.resources.spilled == 0
    assert made[0].programs_at_once >= INVARIANT_PROGRAMS


@pytest.mark.parametrize(
    ("kernel", "unaligned"),
    [
        ("find_kernel", {"positions": 72}),
        (
            "splits_kernel",
            {"positions": 72, "key_scales": 68, "value_scales": 72, "sinks": 66, "maxima": 68, "sums": 76},
        ),
        ("extend_kernel", {"first_positions": 72, "key_scales": 68, "value_scales": 72, "sinks": 66}),
    ],
)
def test_a_pointer_in_the_middle_of_a_buffer_needs_no_second_kernel(kernel, unaligned):
    """A row of a table of positions, a layer's scales: some are at multiples of 16 bytes, some are not."""
    from megatron_rl.models.attention import extend, kernels

    kernel = getattr(extend if kernel == "extend_kernel" else kernels, kernel)
    types = pointers(codes=False)
    assert kind_of_call(kernel, types, unaligned) == kind_of_call(kernel, types)
    if "query" in kernel.arg_names:
        assert kind_of_call(kernel, types, {"query": 68}) != kind_of_call(kernel, types), "this test would see it"
