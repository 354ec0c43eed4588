"""The device of this process: device-specific operations, memory, and out-of-memory errors."""

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
    """The device of this process. Created by `current_platform`."""

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
        """Total bytes of the GPU."""
        return torch.cuda.get_device_properties(self.device).total_memory

    def synchronize(self) -> None:
        """Wait for the device; used only by phase timers at the coarsest level."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def memory_metrics(self) -> dict[str, float]:
        """Return device memory in GiB, under verl's names; empty on a CPU."""
        if not self.is_cuda:
            return {}
        return {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(self.device) / 2**30,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(self.device) / 2**30,
        }


def device_name(device: torch.device) -> str:
    """Return the UUID of a GPU (an index may mean different GPUs in different processes), or a CPU's host name."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def to_device(
    values: torch.Tensor | Sequence[float] | Sequence[Sequence[float]], device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:  # fmt: skip
    """Copy host ``values`` to ``device`` asynchronously, in stream order.

    ``torch.tensor(values, device=...)`` synchronizes the stream. ``non_blocking`` alone may still wait, because CUDA
    first stages unpinned memory.
    """
    held = torch.as_tensor(values, dtype=dtype)
    return (held.pin_memory() if device.type == "cuda" else held).to(device, non_blocking=True)


def current_platform() -> Platform:
    """Return CUDA device ``LOCAL_RANK`` if there is one, otherwise the CPU."""
    if not torch.cuda.is_available():
        return Platform(torch.device("cpu"), "gloo")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    # "cpu:gloo" beside NCCL: host tensors (lengths, rewards) need no device copy.
    return Platform(device, "cpu:gloo,cuda:nccl")


def bf16_speedup(tokens: int = 512, repeats: int = 5) -> float:
    """Measure the speedup of bf16 over fp32 products on this CPU, in about 0.1 s.

    Below 1 without bf16 instructions; with avx512_bf16 or AMX, --bf16 is worthwhile.
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
    """Return whether ``error`` is a failed allocation, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def reason_of(error: BaseException) -> str:
    """Return the allocator's message on one line."""
    text = " ".join(str(error).split())
    text = text.rpartition("DefaultCPUAllocator: ")[2]
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 4].rstrip() + " ..."


class OutOfMemoryOnAllRanks(MemoryError):
    """Raised by every rank at the same point when one ran out of memory, so that collectives still match."""


class DeviceMemory:
    """Memory of one device in bytes, shared equally by ``sharers`` ranks of the job."""

    def __init__(self, device: torch.device, sharers: int = 1) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._sharers = sharers

    def free(self) -> int:
        """Return the bytes that this rank can allocate now: its share of free memory, and its allocator's cache."""
        if not self._on_cuda:
            return host_available() // self._sharers
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] // self._sharers + cached

    def allocated(self) -> int | None:
        """Return the bytes in tensors now; None on a host."""
        return torch.cuda.memory_allocated(self._device) if self._on_cuda else None

    def peak(self) -> int | None:
        """Return the peak bytes in tensors; None on a host."""
        return torch.cuda.max_memory_allocated(self._device) if self._on_cuda else None


def host_available(table: Path = Path("/proc/meminfo")) -> int:
    """Return the available bytes of the host; where unknown (macOS), its total."""
    lines = table.read_text().splitlines() if table.exists() else []
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def storages_of(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> list[torch.UntypedStorage]:
    """Return the distinct storages of ``tensors`` in order, except those shared with ``without``."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in without} | {0}
    found: list[torch.UntypedStorage] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in taken:
            taken.add(storage.data_ptr())
            found.append(storage)
    return found


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return ``storage`` as a tensor, [bytes] uint8; delete it before the storage is freed."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release(storage: torch.UntypedStorage) -> None:
    """Free the memory of a storage; its tensors stay, but are invalid until `restore`."""
    storage.resize_(0)


def restore(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    """Reallocate ``size`` uninitialised bytes, at another address; return them as a tensor."""
    storage.resize_(size)
    return as_bytes(storage)


class OffloadableTensors:
    """Tensors whose memory can be freed and restored at other addresses."""

    keeps_addresses = False
    """Whether captured graphs stay valid after a restore."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """``tensors`` with all views of them; their storages must contain nothing else."""
        self._storages = [(storage, storage.nbytes()) for storage in storages_of(tensors)]
        self.size = sum(size for _, size in self._storages)
        """Bytes while allocated."""
        self.is_released = False
        """Whether all memory is freed, or some of it after an out-of-memory error."""

    def release(self) -> None:
        """Free the memory; tensors are invalid until `restore`. Does nothing if already freed."""
        self.is_released = bool(self._storages)
        for storage, _ in self._storages:
            release(storage)

    def restore(self, zeroed: bool = True) -> None:
        """Reallocate the memory, zeroed or uninitialised. Does nothing if allocated."""
        for storage, size in self._storages if self.is_released else ():
            held = restore(storage, size)
            if zeroed:
                held.zero_()
        self.is_released = False


OffloadableFactory = Callable[[Sequence[torch.Tensor]], OffloadableTensors]
"""Makes the memory of tensors offloadable."""
