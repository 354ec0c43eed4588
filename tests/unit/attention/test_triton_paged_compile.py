"""The kernels over pages compile for Hopper, onto its tensor cores. Needs no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.support.compiling import SHARED_MEMORY, compiled

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled"),
]
SHAPE = {"GROUPS": 8, "WIDTH": 128, "PAGE": 64, "BLOCK_K": 64, "BLOCK_D": 128, "PRECISION": "ieee"}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def pointers(numbers: str, codes: bool) -> dict[str, str]:
    stored = "*fp8e4nv" if codes else numbers
    fp32 = dict.fromkeys(("key_scales", "value_scales", "parts", "maxima", "sums"), "*fp32")
    wide = {"positions": "*i64", "first_positions": "*i64", "table": "*i32", "cu_seqlens": "*i32", "scale": "fp32"}
    return {"query": numbers, "out": numbers, "keys": stored, "values": stored} | fp32 | wide


def without_scales(codes: bool) -> dict[str, None]:
    return {} if codes else dict.fromkeys(("key_scales", "value_scales"))


@pytest.mark.parametrize(("numbers", "codes"), [("*bf16", False), ("*bf16", True), ("*fp32", False)])
def test_decode(numbers, codes):
    from megatron_rl.attention.kernels.paged_decode import splits_kernel

    constants = SHAPE | {"SHARE": 4, "SPLIT": 256, "SPLITS": 16, "BLOCK_Q": 16} | without_scales(codes)
    text, shared = compiled(splits_kernel, pointers(numbers, codes), constants, num_warps=4, num_stages=3)
    assert (".bf16.bf16.f32" in text) == (numbers == "*bf16")
    assert "cp.async" in text, "loads do not overlap with products"
    assert shared <= SHARED_MEMORY


def test_sum():
    from megatron_rl.attention.kernels.paged_decode import sum_kernel

    constants = {"WIDTH": 128, "SPLIT": 256, "SPLITS": 16, "BLOCK_S": 16, "BLOCK_D": 128}
    text, _ = compiled(sum_kernel, pointers("*bf16", False), constants, num_warps=2)
    assert "ex2" in text


@pytest.mark.parametrize(("numbers", "codes"), [("*bf16", False), ("*bf16", True), ("*fp32", False)])
def test_extend(numbers, codes):
    from megatron_rl.attention.kernels.paged_extend import extend_kernel

    constants = SHAPE | {"SHARE": 4, "HEADS": 32, "BLOCK_Q": 64} | without_scales(codes)
    text, shared = compiled(extend_kernel, pointers(numbers, codes), constants, num_warps=4, num_stages=2)
    assert (".bf16.bf16" in text) == (numbers == "*bf16")
    assert shared <= SHARED_MEMORY
