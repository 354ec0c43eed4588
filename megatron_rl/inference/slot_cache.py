"""Slot-contiguous key-value cache: slot ``s`` holds positions 0.. of one sequence."""

from __future__ import annotations

import torch

from megatron_rl.attention.kv_numbers import KVNumbers
from megatron_rl.inference.kv_cache import CacheShape


class SlotCache:
    """Keys and values of all layers, ``[slots, groups, max_length, width]`` each."""

    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        """``dtype`` of the model; ``stored`` as in `KVNumbers`."""
        self.numbers = KVNumbers(shape.layers, shape.groups, dtype, stored, device)
        size = (slots, shape.groups, shape.max_length, shape.width)
        # Zeroed: with the garbage of torch.empty a masked cell gives 0 * NaN = NaN.
        self.keys = [torch.zeros(size, dtype=self.numbers.storage, device=device) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=self.numbers.storage, device=device) for _ in range(shape.layers)]
        self.shape = shape
        self.max_length = shape.max_length
        self.dtype = dtype
        slot = torch.arange(slots, device=device)[:, None] * shape.groups
        group = torch.arange(shape.groups, device=device)
        self._row_start = (slot + group) * shape.max_length

    def next_cells(self, positions: torch.Tensor) -> torch.Tensor:
        """See `Cache.next_cells`."""
        return (self._row_start[: positions.shape[1]] + positions[..., None]).flatten(1)

    def cells(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where token i of slot ``slots[i]``, at ``positions[i]``, goes; to be given to `write`."""
        return (self._row_start.index_select(0, slots) + positions[:, None]).view(-1)

    def write(self, layer: int, cells: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one token a cell: ``key`` and ``value`` [N, 1, groups, width]."""
        width = self.shape.width
        key, value = self.numbers.pack(layer, key, value)
        self.keys[layer].view(-1, width).index_copy_(0, cells, key.reshape(-1, width))
        self.values[layer].view(-1, width).index_copy_(0, cells, value.reshape(-1, width))

    def copy(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """See `Cache.copy`."""
        for buffer in (*self.keys, *self.values):
            buffer[destination, :, :length] = buffer[source, :, :length]
