"""Paged key-value cache: a sequence's keys and values lie in pages, and a table says in which."""

from __future__ import annotations

from array import array

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
        num_pages: int | None = None,
    ) -> None:
        """``dtype`` of the model; ``stored`` as in `KVNumbers`.

        ``num_pages`` are handed out by `set_table`; without it every slot has as many as it can fill, for good.
        """
        self.numbers = KVNumbers(shape.layers, shape.groups, dtype, stored, device)
        per_slot = shape.pages_per_sequence(page_length)
        count = slots * per_slot if num_pages is None else num_pages
        size = (count + 1, page_length, shape.groups, shape.width)
        # Zeroed: with the garbage of torch.empty a masked cell gives 0 * NaN = NaN.
        self.keys = [torch.zeros(size, dtype=self.numbers.storage, device=device) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=self.numbers.storage, device=device) for _ in range(shape.layers)]
        self.shape = shape
        self.max_length = shape.max_length
        self.dtype = dtype
        self.page_length = page_length
        self.table = torch.zeros(slots, per_slot, dtype=torch.int32, device=device)
        """[slots, pages of the longest sequence] int32."""
        if num_pages is None:
            self.table.copy_(torch.arange(1, count + 1).view(slots, per_slot))
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

    def copy(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """See `Cache.copy`; whole pages."""
        del length
        for buffer in (*self.keys, *self.values):
            buffer[destination] = buffer[source]

    def set_table(self, rows: array[int]) -> None:
        """The pages of all slots, row after row, in one copy. In place: captured graphs hold the table's address."""
        self.table.copy_(torch.frombuffer(rows, dtype=torch.int32).view(self.table.shape))
