"""Memory that comes back at the same addresses, over a driver that has the host's memory."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.platform.device import is_out_of_memory
from megatron_rl.platform.reserved import ALIGNMENT, CudaDriver, Reserved, reserved_memory
from tests.support.reserved import DEVICE, OUT_OF_MEMORY, STEP, HostDriver, HostLibrary

TAKEN = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
GIVEN = ["synchronize", "cuMemUnmap", "cuMemRelease"]


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


def some_tensors() -> list[torch.Tensor]:
    """Of several types, two of them in one storage, one without numbers."""
    keys = torch.ones(3, 5, 7, dtype=torch.bfloat16)
    views = [keys[1], keys[..., 2:4], keys.transpose(0, 2)]
    codes = torch.ones(1000).to(torch.float8_e4m3fn)
    return [keys, *views, codes, torch.ones(9, dtype=torch.int16), torch.empty(0, 4)]


def test_it_comes_back_zeroed_where_it_was(driver: HostDriver) -> None:
    tensors = some_tensors()
    before = [(tensor.size(), tensor.stride(), tensor.dtype) for tensor in tensors]
    memory = Reserved(driver, tensors)
    assert [(tensor.size(), tensor.stride(), tensor.dtype) for tensor in tensors] == before
    addresses = [tensor.data_ptr() for tensor in tensors]
    keys, row, part, turned, codes, *_ = tensors
    for round_ in range(3):
        assert not any(tensor.float().count_nonzero() for tensor in tensors)
        keys.copy_(torch.arange(105).view(3, 5, 7))
        codes.fill_(round_ + 1)
        assert row.tolist() == keys[1].tolist()
        assert part.tolist() == keys[..., 2:4].tolist()
        assert turned[6, 4, 2] == 104
        assert codes.float().eq(round_ + 1).all()
        memory.release()
        assert memory.is_released
        assert keys.isnan().all(), "there is nothing to read"
        memory.restore()
        assert not memory.is_released
        assert [tensor.data_ptr() for tensor in tensors] == addresses


def test_storages_lie_in_one_range_each_aligned(driver: HostDriver) -> None:
    tensors = some_tensors()
    memory = Reserved(driver, tensors)
    ((address, size),) = driver.library.sizes.items()
    assert size == memory.size == STEP
    starts = [tensor.data_ptr() - address for tensor in (tensors[0], tensors[4], tensors[5])]
    assert starts == [0, ALIGNMENT, 3 * ALIGNMENT]  # of 210, 1000 and 18 bytes
    large = Reserved(driver, [torch.zeros(STEP + 1, dtype=torch.uint8)])
    assert large.size == 2 * STEP


def test_the_driver_is_called_in_order_and_left_with_nothing(driver: HostDriver) -> None:
    library, tensors = driver.library, some_tensors()
    memory = Reserved(driver, tensors)
    assert library.calls == ["cuInit", "cuMemGetAllocationGranularity", "cuMemAddressReserve", *TAKEN]
    library.calls.clear()
    for _ in range(2):
        memory.release()
        memory.release()
        memory.restore(zeroed=False)
        memory.restore()
    assert tensors[0].isnan().all(), "new memory, which nobody asked to be zeroed"
    assert library.calls == 2 * [*GIVEN, *TAKEN]
    library.calls.clear()
    del memory
    assert library.calls == [], "tensors are there"
    tensors.clear()
    gc.collect()
    assert library.calls == [*GIVEN, "cuMemAddressFree"]
    assert library.handles == library.mapped == library.sizes == {}


def test_what_had_left_is_freed_without_waiting(driver: HostDriver) -> None:
    memory = Reserved(driver, [torch.zeros(3)])
    memory.release()
    driver.library.calls.clear()
    del memory
    gc.collect()
    assert driver.library.calls == ["cuMemAddressFree"]


@pytest.mark.parametrize("name", TAKEN)
def test_a_call_that_fails_is_named_and_leaves_nothing_mapped(driver: HostDriver, name: str) -> None:
    library, keys = driver.library, torch.ones(4)
    memory = Reserved(driver, [keys])
    memory.release()
    library.failures[name] = [801]
    with pytest.raises(EngineError, match=f"^the CUDA driver's {name} returned 801; leave out --rl-persist-cuda"):
        memory.restore()
    assert memory.is_released
    assert library.handles == library.mapped == {}
    memory.restore()
    assert keys.tolist() == [0] * 4


def test_torch_gives_back_what_it_keeps_before_memory_has_run_out(driver: HostDriver) -> None:
    library, keys = driver.library, torch.ones(4)
    memory = Reserved(driver, [keys])
    memory.release()
    library.calls.clear()
    library.failures["cuMemCreate"] = [OUT_OF_MEMORY]
    memory.restore()
    assert library.calls == ["cuMemCreate", "empty_cache", *TAKEN]
    memory.release()
    library.failures["cuMemCreate"] = 2 * [OUT_OF_MEMORY]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory: cuMemCreate returned 2") as refused:
        memory.restore()
    assert is_out_of_memory(refused.value)
    assert memory.is_released
    assert library.handles == {}
    memory.restore()
    assert keys.tolist() == [0] * 4


def test_a_view_that_was_not_given_has_no_memory(driver: HostDriver) -> None:
    """So it cannot be written to without anybody noticing."""
    keys = torch.ones(4)
    view = keys[1:]
    memory = Reserved(driver, [keys])
    assert view.untyped_storage().nbytes() == 0
    assert not memory.is_released


def test_nothing_is_reserved_for_nothing(driver: HostDriver) -> None:
    memory = reserved_memory(driver)([])
    memory.release()
    memory.restore()
    assert (memory.size, memory.is_released) == (0, False)
    assert driver.library.calls == ["cuInit"]
    assert reserved_memory(driver)([torch.zeros(3)]).keeps_addresses


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, as cuda.h of CUDA 12 and 13 has it."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("win32_meta_data", ctypes.c_void_p), ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def test_words_are_the_fields_of_cuda_h(driver: HostDriver) -> None:
    given, access = _Properties.from_buffer_copy(driver.properties), _Access.from_buffer_copy(driver.access)
    assert (ctypes.sizeof(_Properties), ctypes.sizeof(_Access)) == (32, 12)
    assert ctypes.sizeof(driver.properties) == 32
    assert (given.type, given.handle_types, given.location.type, given.location.id) == (1, 0, 1, DEVICE.index)
    assert (given.win32_meta_data, given.compression, given.rdma, given.usage, *given.reserved) == (None, *[0] * 7)
    assert (access.location.type, access.location.id, access.flags) == (1, DEVICE.index, 3)


@pytest.mark.parametrize("is_supported", [True, False])
def test_a_device_says_whether_it_can(is_supported: bool) -> None:
    assert CudaDriver(DEVICE, HostLibrary(is_supported)).can_reserve == is_supported
