"""Recurrent states beside the KV cache: in each layer that has one, a matrix per head for every row of the batch.

A state covers all tokens so far and cannot be truncated. So a prompt continues only from a snapshot, kept in a row
behind those of the batch (`Snapshots`). Samples of one prompt copy the state at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.families import StateCache
from megatron_rl.models.delta_rule import Chunks, LayerStates


class RowStates:
    """The recurrent states of all layers, at fixed addresses."""

    def __init__(self, layers: Sequence[StateCache], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: the model's, for inputs of the convolution; states are fp32."""
        self._taps = layers[0].taps
        self.past = [torch.zeros(rows, one.taps, one.channels, dtype=dtype, device=device) for one in layers]
        self.memory = [
            torch.zeros(rows, one.heads, one.key_width, one.value_width, device=device) for one in layers
        ]
        self._watched = self._alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self._rows: torch.Tensor | None = None
        self._chunks: Chunks | None = None
        self._count, self._continues = 0, False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All state tensors."""
        return [*self.past, *self.memory]

    def watch(self, alive: torch.Tensor) -> None:
        """Freeze the states of rows that are not ``alive`` [rows] in decode steps, e.g. of partly computed prompts."""
        self._watched = self._alive = alive

    def end(self, ended: torch.Tensor) -> None:
        """Freeze the states of rows that have ``ended`` [N] until the next `begin_decode`."""
        self._alive = self._alive[: self._count] & ~ended

    def begin_prompts(self, rows: torch.Tensor, lengths: Sequence[int], continues: bool) -> None:
        """Prepare for prompts of ``rows`` [N], or if it ``continues`` for more tokens of them."""
        self._rows, self._continues = rows, continues
        self._chunks = Chunks.of(lengths, self._taps, rows.device)

    def begin_decode(self, count: int) -> None:
        """Prepare for decode steps of the first ``count`` rows."""
        self._rows, self._chunks, self._count, self._alive = None, None, count, self._watched

    def of(self, layer: int) -> LayerStates:
        """Return the states that ``layer`` reads and writes, as index among the layers with states."""
        held = self.past[layer], self.memory[layer]
        if self._chunks is None:
            read = tuple(each[: self._count] for each in held)
        else:
            read = tuple(each[self._rows] for each in held) if self._continues else (None, None)
        return LayerStates(*read, self._alive[: self._count], self._chunks, self._rows, held)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy rows, as if at once: ``destination[i]`` gets the old content of ``source[i]``."""
        for held in self.tensors:
            held[destination] = held[source]
