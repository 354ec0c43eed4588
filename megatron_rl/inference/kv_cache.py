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

    def share(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """Slot ``destination[i]`` receives the first ``length`` positions of slot ``source[i]``."""
        ...

    def move(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """The sequence of slot ``source[i]``, at most ``length`` tokens, goes to slot ``destination[i]``."""
        ...
