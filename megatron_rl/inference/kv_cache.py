"""Slot-contiguous key-value cache: slot ``s`` holds positions 0.. of one sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.errors import EngineError


@dataclass(frozen=True)
class CacheShape:
    """The size of one sequence's cache on this rank."""

    layers: int
    groups: int
    width: int
    max_length: int
    element_bytes: int

    @classmethod
    def of(cls, gpt: GPTModel, max_length: int, dtype: torch.dtype) -> CacheShape:
        """Read the shape off the model, so that it is right under tensor parallelism."""
        attention = gpt.decoder.layers[0].self_attention
        return cls(
            layers=len(gpt.decoder.layers),
            groups=attention.num_query_groups_per_partition,
            width=attention.hidden_size_per_attention_head,
            max_length=max_length,
            element_bytes=dtype.itemsize,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Keys and values of one sequence of ``max_length`` tokens."""
        return 2 * self.layers * self.groups * self.width * self.max_length * self.element_bytes

    def slots_within(self, budget_gb: float | None, wanted: int) -> int:
        """How many of ``wanted`` slots fit a budget in GiB (None: all of them).

        Raises:
            EngineError: not even one sequence fits.
        """
        if budget_gb is None:
            return wanted
        fitting = int(budget_gb * 2**30 // self.bytes_per_slot)
        if fitting < 1:
            raise EngineError(
                f"the KV cache budget of {budget_gb} GB is too small for one sequence of "
                f"{self.max_length} tokens; use --inference-dynamic-batching-buffer-size-gb "
                f"{_rounded_up(self.bytes_per_slot / 2**30)} or more"
            )
        return min(wanted, fitting)


def _rounded_up(value: float) -> str:
    """Three digits and never less than ``value``, so that who follows the advice is not refused again."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.3g}"


class SlotCache:
    """Keys and values of all layers, ``[slots, groups, max_length, width]`` each."""

    def __init__(
        self, shape: CacheShape, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (slots, shape.groups, shape.max_length, shape.width)
        # Zeroed: with the garbage of torch.empty a masked cell gives 0 * NaN = NaN.
        self.keys = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.shape = shape
        slot = torch.arange(slots, device=device)[:, None] * shape.groups
        group = torch.arange(shape.groups, device=device)
        self._row_start = (slot + group) * shape.max_length

    def cells_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Flat cell index of ``positions`` [..., N] in slots 0..N-1 -> [..., N * groups]."""
        return (self._row_start[: positions.shape[-1]] + positions[..., None]).flatten(-2)

    def write(self, layer: int, cells: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one token a slot: ``key`` and ``value`` [N, 1, groups, width]."""
        width = self.shape.width
        self.keys[layer].view(-1, width).index_copy_(0, cells, key.reshape(-1, width))
        self.values[layer].view(-1, width).index_copy_(0, cells, value.reshape(-1, width))

    def fill(
        self, layer: int, slots: torch.Tensor, source: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Copy prompts into slots: ``key`` [P, groups, L, width], slot ``slots[i]`` gets prompt ``source[i]``.

        Cells beyond a shorter prompt's end receive padding; the sequence overwrites them before
        its mask lets anyone read them.
        """
        length = key.shape[2]
        self.keys[layer][slots, :, :length] = key.index_select(0, source)
        self.values[layer][slots, :, :length] = value.index_select(0, source)

    def move(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` positions of slots ``source`` to slots ``destination``."""
        for buffer in (*self.keys, *self.values):
            buffer[destination, :, :length] = buffer[source, :, :length]
