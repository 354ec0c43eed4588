"""How much memory this process may still take, and errors that say there is none left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_WORDS = (
    "out of memory",  # CUDA's allocator, cuBLAS and NCCL
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
)
_LONGEST_REASON = 160


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def reason_of(error: BaseException) -> str:
    """What the allocator said, on one line."""
    text = " ".join(str(error).split())
    _, found, host = text.partition("DefaultCPUAllocator: ")
    text = host if found else text
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 4].rstrip() + " ..."


class OutOfMemoryTogether(MemoryError):
    """One rank ran out of memory, and every rank of the job raises this at the same point: collectives still work."""


class DeviceMemory:
    """The memory of one device in bytes, as this process sees it; ranks of a host share the host's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._sharers = 1 if self._on_cuda else _ranks_on_this_host()
        self.total = torch.cuda.mem_get_info(device)[1] if self._on_cuda else _physical() // self._sharers
        """All there is; of a host this rank's share."""

    def free(self) -> int:
        """What can be allocated now: free, or cached by torch's allocator."""
        if not self._on_cuda:
            return host_available() // self._sharers
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + cached

    def allocated(self) -> int | None:
        """In tensors now; None on a host, where nobody counts."""
        return torch.cuda.memory_allocated(self._device) if self._on_cuda else None

    def peak(self) -> int | None:
        """The most that was in tensors so far; None on a host."""
        return torch.cuda.max_memory_allocated(self._device) if self._on_cuda else None


def _ranks_on_this_host() -> int:
    """torchrun's number; a job without torchrun has all its ranks here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_available(table: Path = Path("/proc/meminfo")) -> int:
    """Free, or in caches that the system gives up; where it does not say (macOS), all there is."""
    lines = table.read_text().splitlines() if table.exists() else []
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else _physical()
