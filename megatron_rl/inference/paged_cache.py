"""Paged key-value cache: a sequence's keys and values lie in pages, and a table says in which."""

from __future__ import annotations

import torch

from megatron_rl.attention.kv_numbers import KVNumbers
from megatron_rl.inference.kv_cache import CacheShape


class PagedCache:
    """Keys and values of all layers, ``[pages, page_length, groups, width]`` each.

    Page 0 belongs to nobody: rows without a sequence write there.
    """

    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        page_length: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        """``dtype`` of the model; ``stored`` as in `KVNumbers`."""
        self.numbers = KVNumbers(shape.layers, shape.groups, dtype, stored, device)
        per_slot = -(-shape.max_length // page_length)
        size = (slots * per_slot + 1, page_length, shape.groups, shape.width)
        # Zeroed: with the garbage of torch.empty a masked cell gives 0 * NaN = NaN.
        self.keys = [torch.zeros(size, dtype=self.numbers.storage, device=device) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=self.numbers.storage, device=device) for _ in range(shape.layers)]
        self.shape = shape
        self.max_length = shape.max_length
        self.dtype = dtype
        self.page_length = page_length
        self.table = torch.arange(1, slots * per_slot + 1, dtype=torch.int32, device=device).view(slots, per_slot)
        """[slots, pages of the longest sequence] int32."""
        self._rows = torch.arange(slots, device=device)

    def next_cells(self, positions: torch.Tensor) -> torch.Tensor:
        """See `Cache.next_cells`."""
        return self.cells(self._rows[: positions.shape[1]], positions)

    def cells(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `SlotCache.cells`."""
        page = self.table[slots, positions // self.page_length]
        return page * self.page_length + positions % self.page_length

    def write(self, layer: int, cells: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `SlotCache.write`."""
        row = (-1, self.shape.groups, self.shape.width)
        key, value = self.numbers.pack(layer, key, value)
        self.keys[layer].view(row).index_copy_(0, cells, key[:, 0])
        self.values[layer].view(row).index_copy_(0, cells, value[:, 0])

    def share(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """See `SlotCache.share`."""
        reach = -(-length // self.page_length)
        pages, others = (self.table[slots, :reach].flatten() for slots in (source, destination))
        for buffer in (*self.keys, *self.values):
            buffer[others] = buffer[pages]

    def move(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """See `SlotCache.move`; the slots exchange their pages, nothing is copied."""
        del length
        there, back = torch.cat((destination, source)), torch.cat((source, destination))
        self.table[there] = self.table[back]
