"""The kernels compile for Hopper, to the instructions that the definition needs. Needs no GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re

import pytest
import torch

from tests.support.compiling import SHARED_MEMORY, compile_for_hopper, compiled, kind_of_call

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled"),
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("codes", ["i8", "fp8e4nv"])
def test_rows(codes):
    from megatron_rl.quantization.kernels import rows_kernel

    pointers = {"values": "*bf16", "codes": f"*{codes}", "scales": "*fp32", "smoothing": "*fp32"}
    constants = {"BLOCK": 1024}
    text, _ = compiled(rows_kernel, pointers, constants)
    assert "div.rn.f32" in text and "div.full" not in text
    assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == (codes == "fp8e4nv")


@pytest.mark.parametrize("codes", ["i8", "fp8e4nv"])
def test_a_row_takes_two_divisions(codes):
    """Of its scale and of the inverse; each number takes a product and two fused ones. Nothing is rounded twice."""
    from megatron_rl.quantization.kernels import rows_kernel

    pointers = {"values": "*bf16", "codes": f"*{codes}", "scales": "*fp32"}
    text, _ = compiled(rows_kernel, pointers, {"BLOCK": 1024, "smoothing": None}, num_warps=4)
    numbers = 1024 // 128
    assert text.count("div.rn.f32") == 2
    assert (text.count("mul.f32") + text.count("mul.rn.f32"), text.count("fma.rn.f32")) == (numbers, 2 * numbers)
    assert text.count("add.f32") + text.count("add.rn.f32") == (numbers if codes == "i8" else 0)


def test_the_quotient_is_that_of_a_division():
    """The kernels' arithmetic with libm's fused product, for numbers and divisors of a row, at ties too."""
    fused = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fused.argtypes, fused.restype = [ctypes.c_float] * 3, ctypes.c_float
    generator = torch.Generator().manual_seed(0)
    scales = 10 ** (torch.rand(20_000, 1, generator=generator) * 12 - 10)
    codes = torch.cat((torch.randint(-448, 449, (20_000, 3), generator=generator) + 0.5, torch.randn(20_000, 3)), 1)
    values = codes * scales  # about halfway between two integers, and anywhere
    inverses = 1 / scales
    near = values * inverses
    columns = (numbers.expand_as(values).flatten().tolist() for numbers in (near, scales, values, inverses))
    found = [fused(fused(q, -s, v), i, q) for q, s, v, i in zip(*columns, strict=True)]
    assert torch.equal(torch.tensor(found).view_as(values), values / scales)
    assert not torch.equal(near, values / scales), "this test would see it"


@pytest.mark.parametrize(("whole", "rows"), [(True, 128), (False, 16)])
def test_blocks(whole, rows):
    from megatron_rl.quantization.kernels import blocks_kernel

    pointers = {"values": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"}
    constants = {"POWER_OF_TWO": True, "WHOLE": whole, "ROWS": rows}
    text, _ = compiled(blocks_kernel, pointers, constants, num_warps=8)
    assert "div.rn.f32" in text and "div.full" not in text
    assert "cvt.rn.satfinite.e4m3x2.f32" in text


@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_any_number_of_tokens_takes_the_same_kernel(tokens):
    """The scales of segments lie column by column, so their stride is the number of tokens."""
    from megatron_rl.quantization.kernels import blocks_kernel

    types = {"values": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"}
    sizes = dict.fromkeys(("rows", "code_rows", "scale_column_stride"), tokens)
    assert kind_of_call(blocks_kernel, types, sizes) == kind_of_call(blocks_kernel, types)
    assert kind_of_call(blocks_kernel, types, {"columns": 4096}) != kind_of_call(blocks_kernel, types)


@pytest.mark.parametrize(("codes", "product"), [("i8", ".s32.s8.s8"), ("fp8e4nv", ".f32.f16.f16")])
@pytest.mark.parametrize("tokens", [1, 64, 512])
def test_grouped_products(tokens, codes, product):
    """On tensor cores, and all of it stays in registers. Hopper would multiply fp8 as fp16; it has torch's."""
    from megatron_rl.quantization.grouped_kernels import grouped_kernel
    from megatron_rl.quantization.kernels import tiles_for

    tiles = tiles_for(tokens)
    pointers = {"codes": f"*{codes}", "weight_codes": f"*{codes}", "out": "*bf16", "ends": "*i32"}
    pointers |= dict.fromkeys(("scales", "weight_scales"), "*fp32")
    constants = {"EXPERTS": 128, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
    strides = ("code_stride", "weight_stride", "out_stride", "expert_stride", "expert_scale_stride")
    made = compile_for_hopper(
        grouped_kernel, pointers, constants | {"STEPS": 8}, ("columns", "depth", *strides), num_warps=tiles.warps,
        num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    assert product in made.ptx
    assert made.shared <= SHARED_MEMORY
    assert made.resources.spilled == 0


@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_any_number_of_tiles_takes_the_same_grouped_kernel(tokens):
    from megatron_rl.quantization.grouped_kernels import grouped_kernel

    types = dict.fromkeys(("codes", "weight_codes"), "*i8") | {"out": "*bf16", "ends": "*i32"}
    types |= dict.fromkeys(("scales", "weight_scales"), "*fp32")
    assert kind_of_call(grouped_kernel, types, {"row_tiles": tokens}) == kind_of_call(grouped_kernel, types)


@pytest.mark.parametrize(("tokens", "even"), [(1, True), (64, False), (512, True)])
def test_products(tokens, even):
    from megatron_rl.quantization.kernels import matmul_kernel, tiles_for

    tiles = tiles_for(tokens)
    pointers = {"codes": "*i8", "weight_codes": "*i8", "out": "*bf16", "scales": "*fp32", "weight_scales": "*fp32"}
    constants = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "GROUP": 8}
    constants |= {"STEPS": 8, "EVEN": even}
    text, shared = compiled(
        matmul_kernel, pointers, constants, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False
    )
    assert ".s32.s8.s8" in text  # integer tensor cores
    assert "cvt.rn.bf16x2.f32" in text or "cvt.rn.bf16.f32" in text
    assert "fma.rn.f32" not in text  # an fp32 operation rounds once
    assert shared <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("codes", "product", "tiled"),
    [("i8", "k32.s32.s8.s8", False), ("fp8e4nv", "k32.f32.e4m3.e4m3", False), ("fp8e4nv", "k32.f32.e4m3.e4m3", True)],
)
@pytest.mark.parametrize("tokens", [1, 32, 128])
def test_products_of_few_tokens(tokens, codes, product, tiled):
    """On the tensor cores that multiply 8-bit numbers as they are, loaded while others are multiplied."""
    from megatron_rl.quantization.thin_kernels import thin_kernel, tiles_for_few

    tiles, rows = tiles_for_few(tokens), max(tokens, 16)
    pointers = {"codes": f"*{codes}", "weight_codes": f"*{codes}", "out": "*bf16", "scales": "*fp32"}
    constants = {"ROWS": rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "STEPS": 14}
    constants |= {"WHOLE": True, "EVEN": True, "TILED": tiled}
    made = compile_for_hopper(
        thin_kernel, pointers | {"weight_scales": "*fp32"}, constants,
        ("columns", "depth", "code_stride", "weight_stride"), num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}{product}" in made.ptx and "cp.async" in made.ptx
    assert made.resources.spilled == 0 and made.programs_at_once >= 2
    assert "griddepcontrol" not in made.ptx and "prefetch" not in made.ptx


@pytest.mark.parametrize(("dtype", "tiled"), [("fp8e4nv", False), ("fp8e4nv", True), ("i8", False), ("bf16", False)])
def test_a_dependent_product_asks_for_weights_first(dtype, tiled):
    """Four steps of 64 columns by 128 threads: two lines a thread. All else waits for the kernel before."""
    from megatron_rl.quantization.thin_kernels import thin_kernel, tiles_for_few

    tiles = tiles_for_few(32, torch.bfloat16 if dtype == "bf16" else torch.int8)
    types = {"codes": f"*{dtype}", "weight_codes": f"*{dtype}", "out": "*bf16"}
    constants = {"ROWS": 32, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "STEPS": 14, "PDL": True}
    constants |= {"WHOLE": True, "EVEN": True, "TILED": tiled}
    scales = ("scales", "weight_scales")
    constants |= dict.fromkeys(scales) if dtype == "bf16" else {}
    types |= {} if dtype == "bf16" else dict.fromkeys(scales, "*fp32")
    made = compile_for_hopper(
        thin_kernel, types, constants, ("columns", "depth", "code_stride", "weight_stride"), num_warps=tiles.warps,
        num_stages=tiles.stages, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
    asks = [found.start() for found in re.finditer(r"prefetch\.global\.L2", made.ptx)]
    wait, after = made.ptx.index("griddepcontrol.wait"), made.ptx.index("griddepcontrol.launch_dependents")
    accesses = [made.ptx.find(name) for name in ("ld.global", "st.global", "cp.async")]
    assert len(asks) == 2 and max(asks) < wait < after < min(place for place in accesses if place >= 0)
    assert made.resources.spilled == 0 and made.programs_at_once >= 2


def test_a_dependent_sum_of_parts_waits_first():
    from megatron_rl.quantization.thin_kernels import parts_kernel

    types, scales = {"parts": "*fp32", "out": "*bf16"}, dict.fromkeys(("scales", "weight_scales"))
    text, _ = compiled(parts_kernel, types, scales | {"SPLITS": 4, "BLOCK": 1024, "PDL": True}, num_warps=4)
    assert text.index("griddepcontrol.wait") < text.index("ld.global")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tokens", [1, 32, 64])
def test_products_of_few_tokens_in_bf16(tokens, whole):
    """As many steps of K whatever the number of tokens: their order is part of a row's bits."""
    from megatron_rl.quantization.thin_kernels import thin_kernel, tiles_for_few

    tiles, rows = tiles_for_few(tokens, torch.bfloat16), max(tokens, 16)
    pointers = {"codes": "*bf16", "weight_codes": "*bf16", "out": "*bf16" if whole else "*fp32"}
    constants = {"ROWS": rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "STEPS": 14, "scales": None}
    constants |= {"WHOLE": whole, "EVEN": True, "TILED": False, "weight_scales": None}
    made = compile_for_hopper(
        thin_kernel, pointers, constants, ("columns", "depth", "code_stride", "weight_stride"), num_warps=tiles.warps,
        num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"
    assert made.ptx.count(wgmma) == made.ptx.count("wgmma.mma_async") == tiles.depth // 16 and "cp.async" in made.ptx
    assert made.resources.spilled == 0 and made.programs_at_once >= 2
