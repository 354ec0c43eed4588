"""The backend whose kernel is torch's: our arguments, given to plain torch behind the documented signatures.

The kernel itself needs a GPU: tests/gpu/test_gpu_attention.py.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.errors import ConfigError
from megatron_rl.models.attention.backend import BACKENDS, Backend, DeviceFacts, Requirements
from megatron_rl.models.attention.backends import varlen
from megatron_rl.models.attention.kv_format import FP8
from megatron_rl.models.attention.selection import choose, fault_of_cache, fault_of_packed
from tests.support import fake_kernels
from tests.support.paged import FilledPages

HOPPER, AMPERE, TURING, CPU = (
    DeviceFacts("cuda", (9, 0)), DeviceFacts("cuda", (8, 0)), DeviceFacts("cuda", (7, 5)), DeviceFacts("cpu")
)  # fmt: skip
BF16 = Requirements(torch.bfloat16, torch.bfloat16, 128)


KERNELS = {"2.13": fake_kernels.varlen_attn, "2.11": fake_kernels.varlen_attn_of_2_11}


@pytest.fixture(params=["2.13", "2.11"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """As on a torch of that version, its kernel in plain torch."""
    stand_in = SimpleNamespace(varlen_attn=KERNELS[request.param])
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", stand_in)
    monkeypatch.setattr(varlen, "BACKEND", varlen.backend(has_pages=request.param == "2.13"))
    varlen.kernel.cache_clear()
    yield varlen.BACKEND
    varlen.kernel.cache_clear()


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
    """Results and gradients are those of sdpa."""
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
        pytest.skip("torch 2.11 knows no pages")
    pages = FilledPages(lengths, block_size=backend.cache.block_size, heads=2, groups=1, width=8)
    torch.testing.assert_close(*pages.decoded(backend.cache), rtol=1e-5, atol=1e-5)
    starts = [max(0, length - 5) for length in lengths]
    torch.testing.assert_close(*pages.extended(backend.cache, starts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 5])
def test_windows(backend: Backend, window: int) -> None:
    """The self-check of a run with windows passes, in bf16, and fails where they are forgotten."""
    needed, cpu = replace(BF16, head_width=16, window=window, spans=True), torch.device("cpu")
    assert fault_of_packed(backend.packed, needed, 4, 2, cpu) is None
    if backend.cache is not None:
        assert fault_of_cache(backend.cache, needed, 4, 2, cpu) is None
    assert fault_of_packed(replace(backend.packed, attend=_forgets_the_window(backend)), needed, 4, 2, cpu)


def test_a_backend_without_windows_is_refused_by_name_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    own = BACKENDS.get("triton_paged")
    assert choose("auto", HOPPER, replace(BF16, window=512, sinks=True)).cache_name == "triton_paged"
    without = replace(own, cache=replace(own.cache, windows=False))
    monkeypatch.setattr("megatron_rl.models.attention.backends.triton_paged.BACKEND", without)
    with pytest.raises(ConfigError, match="triton_paged has no sliding windows"):
        choose("triton_paged", HOPPER, replace(BF16, window=512))
    assert choose("auto", HOPPER, BF16).cache_name == "triton_paged"
    assert choose("auto", HOPPER, replace(BF16, window=512)).cache_name != "triton_paged"


def test_a_backend_without_sinks_is_refused_by_name_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    needed = replace(BF16, sinks=True)
    with pytest.raises(ConfigError, match="flash has no attention sinks .--softmax-type learnable"):
        choose("flash", HOPPER, needed)
    chosen = choose("auto", HOPPER, needed)
    assert (chosen.packed_name, chosen.cache_name) == ("sdpa", "triton_paged")


@pytest.mark.parametrize("window", [None, 5])
def test_the_self_check_sees_sinks_that_are_forgotten(window: int | None) -> None:
    needed = Requirements(torch.float32, torch.float32, 16, spans=True, window=window, sinks=True)
    packed, cache, shape = BACKENDS.get("sdpa").packed, BACKENDS.get("paged").cache, (4, 2, torch.device("cpu"))
    assert fault_of_packed(packed, needed, *shape) is fault_of_cache(cache, needed, *shape) is None
    deaf = [replace(packed, attend=lambda *given: packed.attend(*given[:4]))]
    deaf.append(replace(packed, spans=replace(packed.spans, attend=lambda *given: packed.spans.attend(*given[:4]))))
    assert all("computes something else" in fault_of_packed(one, needed, *shape) for one in deaf)
    for name in ("decode", "extend"):
        forgets = replace(cache, **{name: lambda *given, name=name: getattr(cache, name)(*given[:4])})
        assert "computes something else" in fault_of_cache(forgets, needed, *shape)


def _forgets_the_window(backend: Backend):
    return lambda query, key, value, call: backend.packed.attend(
        query, key, value, functools.partial(call, window_size=(-1, 0))
    )


def test_the_stand_in_has_the_signature_of_torch() -> None:
    """Of the torch at hand, whose kernel is then called as it wants to be."""
    from torch.nn.attention.varlen import varlen_attn

    stand_in = KERNELS["2.11" if varlen.BACKEND.cache is None else "2.13"]
    theirs, ours = (inspect.signature(function).parameters for function in (varlen_attn, stand_in))
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in ours.values()
    ]


@pytest.mark.parametrize("name", ["flash", "varlen", "triton_paged"])
def test_a_cpu_has_none_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError) as refused:
        choose(name, CPU)
    assert refused.value.lines == [f"--attention-backend {name} needs a CUDA device; use auto, or paged, sdpa"]


@pytest.mark.parametrize(
    ("device", "needed", "packed", "cache"),
    [
        (HOPPER, BF16, "varlen", "triton_paged"),
        (HOPPER, Requirements(torch.bfloat16, FP8, 128), "varlen", "triton_paged"),
        (HOPPER, Requirements(torch.float32, torch.float32, 64), "sdpa", "triton_paged"),
        (HOPPER, Requirements(torch.float32, torch.float32, 128), "sdpa", "sdpa"),
        (HOPPER, Requirements(torch.bfloat16, torch.bfloat16, 512), "sdpa", "sdpa"),
        (AMPERE, Requirements(torch.bfloat16, FP8, 128), "varlen", "sdpa"),
        (TURING, BF16, "sdpa", "triton_paged"),
        (CPU, BF16, "sdpa", "sdpa"),
    ],
)
def test_the_automatic_choice(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    device: DeviceFacts,
    needed: Requirements,
    packed: str,
    cache: str,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    chosen = choose("auto", device, needed)
    assert (chosen.packed_name, chosen.cache_name) == (packed, cache)


@pytest.mark.parametrize("name", ["varlen", "flash"])
def test_the_kernel_by_name_and_by_megatrons(backend: Backend, name: str) -> None:
    """Where it knows no pages, the KV cache is another backend's."""
    chosen = choose(name, HOPPER, BF16)
    assert (chosen.packed_name, chosen.packed) == ("varlen", backend.packed)
    assert chosen.cache_name == ("triton_paged" if backend.cache is None else "varlen")


@pytest.mark.parametrize(
    ("name", "needed", "why"),
    [
        ("flash", Requirements(torch.bfloat16, FP8, 128), "reads a KV cache in the model's own numbers only"),
        ("varlen", Requirements(torch.float32, torch.float32, 128), "computes in 16 bits only (--bf16)"),
        ("varlen", Requirements(torch.bfloat16, torch.bfloat16, 100), "in multiples of 8, not of 100"),
        ("triton_paged", Requirements(torch.bfloat16, torch.bfloat16, 300), "up to 256 numbers, not of 300"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, needed: Requirements, why: str
) -> None:
    monkeypatch.setattr(varlen, "BACKEND", varlen.backend(has_pages=True))
    with pytest.raises(ConfigError) as refused:
        choose(name, HOPPER, needed)
    (line,) = refused.value.lines
    assert line.startswith(f"--attention-backend {name} ") and why in line
    assert name not in line.partition("; use auto, or ")[2]


def test_a_kernel_of_whole_sequences_is_refused_where_a_share_of_them_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(varlen.BACKEND, packed=replace(varlen.BACKEND.packed, spans=None))
    monkeypatch.setattr(varlen, "BACKEND", alone)
    with pytest.raises(ConfigError) as refused:
        choose("varlen", HOPPER, replace(BF16, spans=True))
    (line,) = refused.value.lines
    refusal = "--attention-backend varlen computes whole sequences only (--context-parallel-size, --rl-share-prompts); "
    assert line.startswith(refusal)
    assert choose("varlen", HOPPER, BF16).packed_name == "varlen"
