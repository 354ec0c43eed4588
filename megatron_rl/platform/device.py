"""Which device this process uses, and the few operations that differ between devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


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
        """Of the GPU; None on a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.is_cuda else None

    def synchronize(self) -> None:
        """Wait for the device; used only by phase timers at the coarsest level."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def memory_metrics(self) -> dict[str, float]:
        """Device memory in bytes, under verl's names; empty on a CPU."""
        if not self.is_cuda:
            return {}
        return {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(self.device) / 2**30,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(self.device) / 2**30,
        }


def current_platform() -> Platform:
    """CUDA device ``LOCAL_RANK`` when there is one, otherwise the CPU."""
    if not torch.cuda.is_available():
        return Platform(torch.device("cpu"), "gloo")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    # "cpu:gloo" beside NCCL: host-side tensors (lengths, rewards) move without a device copy.
    return Platform(device, "cpu:gloo,cuda:nccl")
