"""GPU memory that can be freed and restored at the same addresses, so that captured graphs stay valid.

A range of virtual addresses is reserved permanently; physical memory is mapped and unmapped:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html. torch's allocator does not count it.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl.errors import EngineError
from megatron_rl.platform.device import OffloadableFactory, OffloadableTensors, release, storages_of

ALIGNMENT = 512
"""Alignment of storages in bytes, as in torch's allocator."""
_OUT_OF_MEMORY = 2
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class CudaDriver:
    """The driver's memory calls for one device."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        """``library``: of the driver; None: the system's."""
        self.device = device
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        # As 32-bit words: a CUmemAllocationProp (pinned, no shareable handle, on the device), and a CUmemAccessDesc (on
        # the device, read and write).
        self.properties = (ctypes.c_int * 8)(1, 0, 1, device.index)
        self.access = (ctypes.c_int * 3)(1, device.index, 3)
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``name``; ints are passed as 64 bits.

        Raises:
            torch.OutOfMemoryError: out of memory.
            EngineError: the driver returns another error.
        """
        code = getattr(self._library, name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments))
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {name} returned {code}")
        if code:
            raise EngineError(f"the CUDA driver's {name} returned {code}; leave out --rl-persist-cuda-graphs")

    @property
    def can_reserve(self) -> bool:
        """Whether the device supports virtual memory management."""
        answer, device = ctypes.c_int(), ctypes.c_int(self.device.index)
        self.call("cuDeviceGetAttribute", ctypes.byref(answer), ctypes.c_int(_SUPPORTED), device)
        return bool(answer.value)

    def synchronize(self) -> None:
        """Wait for kernels that may read memory about to be unmapped: the driver does not."""
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Free unused memory of torch's allocator."""
        torch.cuda.empty_cache()

    def as_bytes(self, memory: Reserved) -> torch.Tensor:
        """Return mapped ``memory`` as a tensor [bytes] uint8 that keeps it alive."""
        return torch.as_tensor(memory, device=self.device)


class Reserved(OffloadableTensors):
    """`OffloadableTensors` at fixed addresses, which are kept until the last tensor is deleted."""

    keeps_addresses = True

    def __init__(self, driver: CudaDriver, tensors: Sequence[torch.Tensor]) -> None:
        """Move ``tensors``, with all views of them, into one range; they are zeroed."""
        self._driver = driver
        self._mapped = contextlib.ExitStack()
        places, end = {0: 0}, 0
        for storage in (storages := storages_of(tensors)):
            places[storage.data_ptr()] = end
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self._reserve(end)
        begins = [places[tensor.untyped_storage().data_ptr()] for tensor in tensors]
        views = [(tensor.storage_offset(), tensor.size(), tensor.stride()) for tensor in tensors]
        for storage in storages:
            release(storage)  # a view that was not given has no memory from here on
        self.restore()
        held = driver.as_bytes(self).untyped_storage()
        for tensor, begin, (offset, *shape) in zip(tensors, begins, views, strict=True):
            tensor.set_(held, begin // tensor.itemsize + offset, *shape)

    def _reserve(self, size: int) -> None:
        """Reserve addresses for ``size`` bytes, rounded up to the mapping granularity."""
        call, step, address = self._driver.call, ctypes.c_size_t(), ctypes.c_uint64()
        properties, kind = ctypes.byref(self._driver.properties), ctypes.c_int(0)
        call("cuMemGetAllocationGranularity", ctypes.byref(step), properties, kind)
        self.size = -(-size // step.value) * step.value
        call("cuMemAddressReserve", ctypes.byref(address), self.size, 0, 0, 0)
        self.address, self.is_released = address.value, True
        weakref.finalize(self, _free, call, self.address, self.size, self._mapped).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def release(self) -> None:
        self.is_released = True
        self._mapped.close()

    def restore(self, zeroed: bool = True) -> None:
        if not self.is_released:
            return
        driver, handle = self._driver, ctypes.c_uint64()
        create = "cuMemCreate", ctypes.byref(handle), self.size, ctypes.byref(driver.properties), 0
        try:
            driver.call(*create)
        except torch.OutOfMemoryError:
            driver.empty_cache()
            driver.call(*create)
        with contextlib.ExitStack() as undo:  # from the last to the first, also where the next call fails
            undo.callback(driver.call, "cuMemRelease", handle)
            driver.call("cuMemMap", self.address, self.size, 0, handle, 0)
            undo.callback(driver.call, "cuMemUnmap", self.address, self.size)
            driver.call("cuMemSetAccess", self.address, self.size, ctypes.byref(driver.access), 1)
            undo.callback(driver.synchronize)
            self._mapped.push(undo.pop_all())
        self.is_released = False
        if zeroed:
            driver.as_bytes(self).zero_()


def _free(call: Callable[..., None], address: int, size: int, mapped: contextlib.ExitStack) -> None:
    with contextlib.suppress(EngineError, RuntimeError):  # nobody is there to hear of it, and CUDA may be broken
        mapped.close()
        call("cuMemAddressFree", address, size)


def reserved_memory(driver: CudaDriver) -> OffloadableFactory:
    """Return a constructor of `Reserved` tensors."""
    return lambda tensors: Reserved(driver, tensors) if storages_of(tensors) else OffloadableTensors(())
