"""What the host says of its memory, and which errors mean that there is none left."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.platform import device
from megatron_rl.platform.device import DeviceMemory, device_name, is_out_of_memory, reason_of

CPU = torch.device("cpu")


def refusal() -> RuntimeError:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    return refused.value


def test_the_hosts_own_refusal_is_recognised() -> None:
    error = refusal()
    assert is_out_of_memory(error)
    assert reason_of(error).startswith("can't allocate memory: you tried to allocate 1152921504606846976 bytes")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_other_refusals(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert "\n" not in reason_of(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape '[3]' is invalid for input of size 2"), ValueError("out of memory"), KeyError("x")]
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_a_long_reason_is_cut() -> None:
    reason = reason_of(torch.OutOfMemoryError("CUDA out of memory. " + "and so on " * 100))
    assert reason.startswith("CUDA out of memory.") and reason.endswith(" ...") and len(reason) <= 160


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "host_available", lambda: 1000)
    assert [DeviceMemory(CPU, sharers).free() for sharers in (1, 4)] == [1000, 250]
    assert DeviceMemory(CPU).peak() is DeviceMemory(CPU).allocated() is None


def test_ranks_of_a_gpu_share_what_is_free_and_not_what_each_has_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 150)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    gpu = torch.device("cuda", 0)
    assert [DeviceMemory(gpu, sharers).free() for sharers in (1, 3)] == [1000, 400]


def test_a_gpu_is_told_by_its_uuid_and_a_cpu_by_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launcher numbers the GPUs that it sees from 0."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid.UUID(int=7)))
    assert device_name(torch.device("cuda", 0)) == device_name(torch.device("cuda", 1)) == str(uuid.UUID(int=7))
    assert device_name(CPU) == socket.gethostname()


def test_caches_that_the_system_gives_up_are_free(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:       16000 kB\nMemFree:         100 kB\nMemAvailable:    7000 kB\n")
    assert device.host_available(table) == 7000 * 1024
    assert device.host_available(tmp_path / "absent") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
