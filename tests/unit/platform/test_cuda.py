"""What torch is told on a machine with CUDA, by the calls that are made; torch keeps both settings without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_rl import platform
from megatron_rl.platform import cpu, cuda


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    return told


@pytest.fixture(autouse=True)
def cudnn() -> Iterator[None]:
    """On, as torch begins."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnn_s_attention_is_off_and_segments_grow(allocator: list[str]) -> None:
    cuda.install({})
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    assert allocator == ["expandable_segments:True"]


@pytest.mark.parametrize("variable", cuda.ALLOCATOR_VARIABLES)
def test_an_allocator_that_the_user_configured_is_left_alone(allocator: list[str], variable: str) -> None:
    cuda.install({variable: "expandable_segments:False"})
    assert allocator == []
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_torch_takes_the_setting() -> None:
    """The real call, whose effect no CPU shows; a value that torch cannot read is an error."""
    with pytest.raises((RuntimeError, ValueError)):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:perhaps")
    try:
        cuda.install({})
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("available", [True, False])
def test_the_preparation_installs_what_the_machine_needs(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    installed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(cuda, "install", lambda: installed.append("cuda"))
    monkeypatch.setattr(cpu, "install", lambda: installed.append("cpu"))
    platform.prepare.__wrapped__()
    assert installed == ["cuda" if available else "cpu"]


def test_without_split_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a workspace nor by torch's choice."""
    libraries: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    before = [getattr(torch._C, f"_get_cublas_allow_{kind}_reduced_precision_reduction")() for kind in ("bf16", "fp16")]
    try:
        cuda.forbid_split_k()
        assert torch._C._get_cublas_allow_bf16_reduced_precision_reduction() == (False, False)
        assert torch._C._get_cublas_allow_fp16_reduced_precision_reduction() == (False, False)
    finally:
        for kind, value in zip(("bf16", "fp16"), before, strict=True):
            setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", value)
    variables = cuda.environment_for(batch_invariant=True)
    assert (variables["CUBLASLT_WORKSPACE_SIZE"], variables["CUBLAS_WORKSPACE_CONFIG"]) == ("0", ":16:8")
    assert libraries == ["cublaslt"]
