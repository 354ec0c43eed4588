"""Memory of tensors that goes and comes back while the tensors, and all views of them, stay the same objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def storages_of(
    tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()
) -> list[torch.UntypedStorage]:
    """The storages behind ``tensors``, each once and in order, but none that one of ``without`` lies in."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in without} | {0}
    found: list[torch.UntypedStorage] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in taken:
            taken.add(storage.data_ptr())
            found.append(storage)
    return found


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of ``storage`` as a tensor, [bytes] uint8; let go of it before the storage is released."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release(storage: torch.UntypedStorage) -> None:
    """Give the memory up. Reading a tensor in it is an error of the caller until it is back."""
    storage.resize_(0)


def take_back(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    """Memory of ``size`` bytes, at another address and with anything in it; returned as bytes."""
    storage.resize_(size)
    return as_bytes(storage)
