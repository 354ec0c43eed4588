"""The size of the key-value cache and its two layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.attention.backend import KVCache
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

    def pages_per_sequence(self, page_length: int) -> int:
        """Pages of ``page_length`` tokens of the longest sequence."""
        return -(-self.max_length // page_length)

    def pages_within(self, budget_gb: float | None, page_length: int, slots: int) -> int:
        """How many pages fit a budget in GiB beside the one that is nobody's; never more than ``slots`` can fill.

        Raises:
            EngineError: not even one sequence fits.
        """
        needed = self.pages_per_sequence(page_length)
        if budget_gb is None:
            return slots * needed
        bytes_per_page = self.bytes_per_slot * page_length // self.max_length
        fitting = int(budget_gb * 2**30 // bytes_per_page) - 1
        if fitting < needed:
            raise EngineError(
                f"the KV cache budget of {budget_gb} GB is too small for one sequence of {self.max_length} tokens in "
                f"pages of {page_length} and the page that is nobody's; use "
                f"--inference-dynamic-batching-buffer-size-gb {_rounded_up((needed + 1) * bytes_per_page / 2**30)} "
                "or more"
            )
        return min(slots * needed, fitting)


def _rounded_up(value: float) -> str:
    """Three digits and never less than ``value``, so that who follows the advice is not refused again."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.3g}"


class Cache(KVCache, Protocol):
    """What the engine and its context ask of a cache."""

    shape: CacheShape

    def next_cells(self, positions: torch.Tensor) -> torch.Tensor:
        """Where the tokens at ``positions`` [k, N] of slots 0..N-1 go; the i-th is to be given to `write` in step i."""
        ...

    def cells(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where token i of slot ``slots[i]``, at ``positions[i]``, goes; to be given to `write`."""
        ...

    def write(self, layer: int, cells: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one token a cell: ``key`` and ``value`` [N, 1, groups, width]."""
        ...

    def copy(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """Slot, or page, ``destination[i]`` receives what ``source[i]`` held before any of them was changed.

        Of slots no more than the first ``length`` positions.
        """
        ...
