"""Backends whose kernels belong to others: our arguments, given to plain torch behind the documented signatures.

The kernels themselves need a GPU: tests/gpu/test_gpu_attention.py.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.attention.backend import Backend, DeviceFacts, Numbers
from megatron_rl.attention.backends import flash, te, varlen
from megatron_rl.attention.kv_numbers import FP8
from megatron_rl.attention.proof import fault_of_cache, fault_of_packed
from megatron_rl.attention.selection import choose
from megatron_rl.errors import ConfigError
from megatron_rl.registry import BACKENDS
from tests.support import fake_kernels
from tests.support.paged import FilledPages

HOPPER, AMPERE, TURING, CPU = (
    DeviceFacts("cuda", (9, 0)), DeviceFacts("cuda", (8, 0)), DeviceFacts("cuda", (7, 5)), DeviceFacts("cpu")
)  # fmt: skip
BF16 = Numbers(torch.bfloat16, torch.bfloat16, 128)


@pytest.fixture(params=["flash 2", "flash 3", "early flash 3", "varlen", "te"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """One backend with its library in plain torch."""
    name = request.param.split()
    modules = {
        "flash 2": fake_kernels.flash_attn(),
        "flash 3": fake_kernels.flash_attn_interface(),
        "early flash 3": fake_kernels.flash_attn_interface(with_sums=True),
        "varlen": fake_kernels.module("torch.nn.attention.varlen", fake_kernels.varlen_attn),
        "te": fake_kernels.transformer_engine(),
    }
    installed = modules[request.param]
    monkeypatch.setitem(sys.modules, installed.__name__, installed)
    monkeypatch.setattr(flash, "installed", lambda: installed.__name__)
    te.attention_module.cache_clear()
    yield BACKENDS.get("flash" if "flash" in name else name[0])
    te.attention_module.cache_clear()


def test_packed(backend: Backend) -> None:
    """Results and gradients are those of sdpa."""
    lengths, generator = [3, 1, 40], torch.Generator().manual_seed(0)
    borders = torch.tensor([0, 3, 4, 44], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    size = sum(lengths)
    tensors = [torch.randn(size, 1, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    results = []
    for one in (backend, BACKENDS.get("sdpa")):
        out = one.packed.attend(*tensors, one.packed.prepare(lengths, borders, positions))
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    assert results[0][0].shape == (size, 1, 64)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_spans_of_a_context_parallel_rank(backend: Backend) -> None:
    """Results and gradients are those of sdpa; what cannot says so."""
    if backend.packed.spans is None:
        assert backend.name == "te"
        return
    share, generator = ContextShare.of([3, 1, 40], 1, 2), torch.Generator().manual_seed(0)
    sizes = ((22, 4), (sum(share.key_lengths), 2), (sum(share.key_lengths), 2))
    tensors = [torch.randn(size, 1, heads, 16, generator=generator).requires_grad_() for size, heads in sizes]
    results = []
    for kernel in (backend.packed.spans, BACKENDS.get("sdpa").packed.spans):
        out = kernel.attend(*tensors, kernel.prepare(share))
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    assert results[0][0].shape == (22, 1, 64)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1], [300, 7, 256, 513]])
def test_cache(backend: Backend, lengths: list[int]) -> None:
    if backend.cache is None:
        assert backend.name == "te"
        return
    pages = FilledPages(lengths, block_size=backend.cache.block_size, heads=2, groups=1, width=8)
    torch.testing.assert_close(*pages.decoded(backend.cache), rtol=1e-5, atol=1e-5)
    starts = [max(0, length - 5) for length in lengths]
    torch.testing.assert_close(*pages.extended(backend.cache, starts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 5])
def test_windows(backend: Backend, window: int) -> None:
    """The self-check of a run with windows passes, in bf16; what has none is not chosen."""
    numbers, cpu = replace(BF16, width=16, window=window, context_size=2), torch.device("cpu")
    if not backend.packed.windows:
        assert backend.name == "te"
        return
    assert fault_of_packed(backend.packed, numbers, 4, 2, cpu) is None
    assert fault_of_cache(backend.cache, numbers, 4, 2, cpu) is None
    assert fault_of_packed(replace(backend.packed, attend=_forgets_the_window(backend)), numbers, 4, 2, cpu)


def test_a_backend_without_windows_is_refused_by_name_and_passed_over() -> None:
    with pytest.raises(ConfigError, match="triton_paged has no sliding windows"):
        choose("triton_paged", HOPPER, replace(BF16, window=512))
    assert choose("auto", HOPPER, BF16, {"flash": "is absent"}).cache_name == "triton_paged"
    assert choose("auto", HOPPER, replace(BF16, window=512), {"flash": "is absent"}).cache_name != "triton_paged"


def _forgets_the_window(backend: Backend):
    return lambda query, key, value, plan: backend.packed.attend(query, key, value, replace(plan, window=None))


def test_the_stand_in_has_the_signature_of_torch() -> None:
    """Where torch has the paged kernel, ours is called as it wants to be."""
    if not varlen.is_paged():
        pytest.skip("needs torch 2.13 or later")
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    theirs, ours = (inspect.signature(function).parameters for function in (varlen_attn, fake_kernels.varlen_attn))
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in ours.values()
    ]


@pytest.mark.parametrize("name", ["flash", "varlen", "te", "triton_paged"])
def test_a_cpu_has_none_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError) as refused:
        choose(name, CPU)
    assert refused.value.lines == [f"--attention-backend {name} needs a CUDA device; use auto, or paged, sdpa"]


@pytest.mark.parametrize(
    ("installed", "device", "numbers", "packed", "cache"),
    [
        ("flash_attn", HOPPER, BF16, "flash", "flash"),
        (None, HOPPER, BF16, "varlen", "triton_paged"),
        ("flash_attn", HOPPER, Numbers(torch.bfloat16, FP8, 128), "flash", "triton_paged"),
        ("flash_attn", HOPPER, Numbers(torch.float32, torch.float32, 64), "sdpa", "triton_paged"),
        ("flash_attn", HOPPER, Numbers(torch.float32, torch.float32, 128), "sdpa", "sdpa"),
        ("flash_attn", HOPPER, Numbers(torch.bfloat16, torch.bfloat16, 512), "sdpa", "sdpa"),
        ("flash_attn", AMPERE, Numbers(torch.bfloat16, FP8, 128), "flash", "sdpa"),
        ("flash_attn", TURING, BF16, "sdpa", "triton_paged"),
        ("flash_attn", CPU, BF16, "sdpa", "sdpa"),
    ],
)
def test_the_automatic_choice(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, device: DeviceFacts, numbers: Numbers, packed, cache
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(flash, "installed", lambda: installed)
    monkeypatch.setattr(varlen, "is_paged", lambda: True)
    chosen = choose("auto", device, numbers)
    assert (chosen.packed_name, chosen.cache_name) == (packed, cache)


def test_without_varlen_and_flash_sdpa_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "installed", lambda: None)
    monkeypatch.setattr(varlen, "is_paged", lambda: False)
    chosen = choose("auto", HOPPER, BF16)
    assert (chosen.packed_name, chosen.cache_name) == ("sdpa", "triton_paged")
    assert "flash needs flash-attn, which is not installed; varlen needs torch 2.13 or later" in chosen.reason


@pytest.mark.parametrize(
    ("name", "numbers", "why"),
    [
        ("flash", Numbers(torch.bfloat16, FP8, 128), "reads a KV cache in the model's own numbers only"),
        ("flash", Numbers(torch.float32, torch.float32, 128), "computes in 16 bits only (--bf16)"),
        ("varlen", Numbers(torch.bfloat16, torch.bfloat16, 100), "in multiples of 8, not of 100"),
        ("triton_paged", Numbers(torch.bfloat16, torch.bfloat16, 300), "up to 256 numbers, not of 300"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, numbers: Numbers, why: str
) -> None:
    monkeypatch.setattr(flash, "installed", lambda: "flash_attn")
    monkeypatch.setattr(varlen, "is_paged", lambda: True)
    with pytest.raises(ConfigError) as refused:
        choose(name, HOPPER, numbers)
    (line,) = refused.value.lines
    assert line.startswith(f"--attention-backend {name} ") and why in line
    assert name not in line.partition("; use auto, or ")[2]


def test_transformer_engine_is_taken_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if "transformer" in name else found(name))
    assert choose("auto", HOPPER, BF16).packed_name != "te"
    chosen = choose("te", HOPPER, BF16)
    assert (chosen.packed_name, chosen.cache_name) == ("te", "triton_paged")


def test_a_kernel_that_cannot_share_sequences_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if "transformer" in name else found(name))
    shared = Numbers(torch.bfloat16, torch.bfloat16, 128, context_size=2)
    with pytest.raises(ConfigError) as refused:
        choose("te", HOPPER, shared)
    (line,) = refused.value.lines
    assert line.startswith("--attention-backend te cannot share sequences over ranks (--context-parallel-size); use ")
    assert choose("te", HOPPER, BF16).packed_name == "te"
