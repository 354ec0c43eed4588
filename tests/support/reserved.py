"""In the place of CUDA's driver: its virtual memory over the host's, by the rules that cuda.h states."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from megatron_rl.platform.reserved import CudaDriver, Reserved

STEP = 4096
"""Mapped at once."""
DEVICE = torch.device("cuda", 1)
"""Whose number the calls must have; tensors are the host's."""
INVALID, OUT_OF_MEMORY = 1, 2


class HostLibrary:
    """Answers with a code as libcuda.so does, and with 1 to whatever breaks a rule.

    What is not mapped holds NaN, and so does memory that is new.
    """

    def __init__(self, supported: bool = True) -> None:
        self.calls: list[str] = []
        """Names, in order."""
        self.failures: dict[str, list[int]] = {}
        """The codes of a call's next answers."""
        self.sizes: dict[int, int] = {}
        """Of reserved ranges by address."""
        self.handles: dict[int, int] = {}
        """Sizes of physical memory that was not released."""
        self.mapped: dict[int, int] = {}
        """Handles by address."""
        self.accessible: set[int] = set()
        self._supported = supported
        self._memory: dict[int, Any] = {}
        self._created = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if self.failures.get(name):
                return self.failures[name].pop(0)
            values = [getattr(argument, "_obj", argument) for argument in arguments]
            return 0 if getattr(self, name.removeprefix("cu"))(*values) else INVALID

        return call

    def Init(self, flags: ctypes.c_uint) -> bool:
        return flags.value == 0

    def DeviceGetAttribute(self, answer: ctypes.c_int, which: ctypes.c_int, device: ctypes.c_int) -> bool:
        answer.value = self._supported
        return (which.value, device.value) == (102, DEVICE.index)

    def MemGetAllocationGranularity(self, step: Any, properties: Any, kind: ctypes.c_int) -> bool:
        step.value = STEP
        return bool(ctypes.sizeof(properties)) and kind.value == 0

    def MemAddressReserve(self, address: Any, size: Any, alignment: Any, at: Any, flags: Any) -> bool:
        memory = ctypes.create_string_buffer(size.value + STEP)
        address.value = -(-ctypes.addressof(memory) // STEP) * STEP
        self._memory[address.value], self.sizes[address.value] = memory, size.value
        self._spoil(address.value)
        return size.value > 0 and size.value % STEP == 0 and alignment.value == at.value == flags.value == 0

    def MemAddressFree(self, address: Any, size: Any) -> bool:
        return address.value not in self.mapped and self.sizes.pop(address.value, None) == size.value

    def MemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> bool:
        self._created += 1
        handle.value = self._created
        self.handles[handle.value] = size.value
        return size.value % STEP == flags.value == 0 and ctypes.sizeof(properties) == 32

    def MemRelease(self, handle: Any) -> bool:
        return self.handles.pop(handle.value, None) is not None

    def MemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> bool:
        is_free = address.value not in self.mapped and offset.value == flags.value == 0
        self.mapped[address.value] = handle.value
        return is_free and self.sizes[address.value] == size.value == self.handles[handle.value]

    def MemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> bool:
        self.accessible.add(address.value)
        return address.value in self.mapped and size.value == self.sizes[address.value] and count.value == 1

    def MemUnmap(self, address: Any, size: Any) -> bool:
        self.accessible.discard(address.value)
        self._spoil(address.value)
        return self.mapped.pop(address.value, None) is not None and self.sizes[address.value] == size.value

    def _spoil(self, address: int) -> None:
        ctypes.memset(address, 255, self.sizes[address])


class HostDriver(CudaDriver):
    """The library's own code over it; what asks torch's CUDA is noted among the calls."""

    def __init__(self, library: HostLibrary | None = None) -> None:
        self.library = library or HostLibrary()
        super().__init__(DEVICE, self.library)

    def synchronize(self) -> None:
        self.library.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.library.calls.append("empty_cache")

    def as_bytes(self, memory: Reserved) -> torch.Tensor:
        described = memory.__cuda_array_interface__
        (size,), (address, is_read_only) = described["shape"], described["data"]
        assert described["typestr"] == "|u1"
        assert address in self.library.accessible, "there is no memory to describe"
        assert not is_read_only
        buffer = (ctypes.c_ubyte * size).from_address(address)
        buffer.owner = memory  # as torch holds what describes its memory
        return torch.frombuffer(buffer, dtype=torch.uint8)
