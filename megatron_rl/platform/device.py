"""The device of this process: operations that differ between devices, its memory, and running out of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_OUT_OF_MEMORY = (
    "out of memory",  # CUDA's allocator, cuBLAS and NCCL
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
_LONGEST_REASON = 160


@dataclass(frozen=True)
class Platform:
    """The device of this process. Build it with `current_platform`."""

    device: torch.device
    distributed_backend: str

    @property
    def is_cuda(self) -> bool:
        """True on an NVIDIA GPU."""
        return self.device.type == "cuda"

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU; None on a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.is_cuda else None

    @property
    def memory(self) -> int:
        """Bytes of the GPU."""
        return torch.cuda.get_device_properties(self.device).total_memory

    def synchronize(self) -> None:
        """Wait for the device; used only by phase timers at the coarsest level."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def memory_metrics(self) -> dict[str, float]:
        """Return device memory in bytes, under verl's names; empty on a CPU."""
        if not self.is_cuda:
            return {}
        return {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(self.device) / 2**30,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(self.device) / 2**30,
        }


def name_of(device: torch.device) -> str:
    """Return the UUID of a GPU, whose index differs where launchers see different GPUs, or the name of a CPU's host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def to_device(
    values: torch.Tensor | Sequence[float] | Sequence[Sequence[float]], device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:  # fmt: skip
    """Copy ``values`` of the host to ``device`` in stream order: the host does not wait for the work in front of them.

    ``torch.tensor(values, device=...)`` waits for all of it, as torch synchronizes the stream after such a copy. A copy
    with ``non_blocking`` may still wait in CUDA, which first stages what is not pinned.
    """
    held = torch.as_tensor(values, dtype=dtype)
    return (held.pin_memory() if device.type == "cuda" else held).to(device, non_blocking=True)


def current_platform() -> Platform:
    """Return CUDA device ``LOCAL_RANK`` when there is one, otherwise the CPU."""
    if not torch.cuda.is_available():
        return Platform(torch.device("cpu"), "gloo")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    # "cpu:gloo" beside NCCL: host-side tensors (lengths, rewards) move without a device copy.
    return Platform(device, "cpu:gloo,cuda:nccl")


def gain_of_bf16(tokens: int = 512, repeats: int = 5) -> float:
    """Measure how many times as fast as fp32's this processor's products of bf16 are: about 0.1 s.

    Without instructions for them they are slower; with avx512_bf16 or AMX, --bf16 pays.
    """
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs, weight = torch.ones(tokens, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        torch.nn.functional.linear(inputs, weight)  # builds the kernel
        spans = []
        for _ in range(repeats):
            started = time.perf_counter()
            torch.nn.functional.linear(inputs, weight)
            spans.append(time.perf_counter() - started)
        times.append(min(spans))
    return times[0] / times[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def reason_of(error: BaseException) -> str:
    """Return what the allocator said, on one line."""
    text = " ".join(str(error).split())
    text = text.rpartition("DefaultCPUAllocator: ")[2]
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 4].rstrip() + " ..."


class OutOfMemoryOnAllRanks(MemoryError):
    """One rank ran out of memory, and every rank of the job raises this at the same point: collectives still work."""


class DeviceMemory:
    """The memory of one device in bytes, for one of the ``sharers`` ranks of the job that use it in equal parts."""

    def __init__(self, device: torch.device, sharers: int = 1) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._sharers = sharers

    def free(self) -> int:
        """Return the bytes that this rank can allocate now: its part of what is free, and its allocator's cache."""
        if not self._on_cuda:
            return host_available() // self._sharers
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] // self._sharers + cached

    def allocated(self) -> int | None:
        """Return the bytes in tensors now; None on a host, where nobody counts."""
        return torch.cuda.memory_allocated(self._device) if self._on_cuda else None

    def peak(self) -> int | None:
        """Return the most that was in tensors so far; None on a host."""
        return torch.cuda.max_memory_allocated(self._device) if self._on_cuda else None


def host_available(table: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that are free, or in caches that can be given up; where it is not said (macOS), all."""
    lines = table.read_text().splitlines() if table.exists() else []
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def storages_of(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> list[torch.UntypedStorage]:
    """Return the storages behind ``tensors``, each once and in order, but none that one of ``without`` lies in."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in without} | {0}
    found: list[torch.UntypedStorage] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in taken:
            taken.add(storage.data_ptr())
            found.append(storage)
    return found


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of ``storage`` as a tensor, [bytes] uint8; let go of it before the storage is released."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release(storage: torch.UntypedStorage) -> None:
    """Give the memory up until `take_back`: tensors in it and their views stay, but nobody may read them."""
    storage.resize_(0)


def take_back(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    """Allocate ``size`` bytes again, at another address and with anything in it; returned as bytes."""
    storage.resize_(size)
    return as_bytes(storage)


class Leaving:
    """The memory of tensors that leaves and comes back, at other addresses; the tensors stay."""

    keeps_addresses = False
    """Whether a captured graph may read them after they have come back."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """``tensors`` with all views of them; nothing else may lie in their storages."""
        self._storages = [(storage, storage.nbytes()) for storage in storages_of(tensors)]
        self.size = sum(size for _, size in self._storages)
        """Bytes while they are there."""
        self.is_released = False
        """Whether they have left, all or, where memory ran out, some of them."""

    def release(self) -> None:
        """Let them leave: nobody may read them until `take_back`. Nothing where they have left already."""
        self.is_released = bool(self._storages)
        for storage, _ in self._storages:
            release(storage)

    def take_back(self, zeroed: bool = True) -> None:
        """Bring them back, with zeros or else with anything in them. Nothing where they are there."""
        for storage, size in self._storages if self.is_released else ():
            held = take_back(storage, size)
            if zeroed:
                held.zero_()
        self.is_released = False


LeavingOf = Callable[[Sequence[torch.Tensor]], Leaving]
"""How the memory of tensors leaves."""
