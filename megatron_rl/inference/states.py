"""Recurrent states beside the KV cache: of each layer that has one, a matrix a head for every row of the batch.

A state is that of all tokens so far, and cannot be cut back to fewer. So a prompt goes on only from a copy that was
kept in a row behind those of the batch (`Snapshots`). Samples of one prompt copy the state at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.families import StateCache
from megatron_rl.models.delta_rule import Chunks, LayerStates


class RowStates:
    """The states of all layers, in tensors whose addresses stay."""

    def __init__(self, layers: Sequence[StateCache], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype`` of the model, in which the inputs of the convolution are kept; states are fp32."""
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
        """The tensors that hold them."""
        return [*self.past, *self.memory]

    def watch(self, alive: torch.Tensor) -> None:
        """Keep the states of rows that are not ``alive`` [rows] in decode steps: their prompts may be under way."""
        self._watched = self._alive = alive

    def end(self, ended: torch.Tensor) -> None:
        """Keep the states of rows that have ``ended`` [N] from now on until `begin_decode`."""
        self._alive = self._alive[: self._count] & ~ended

    def begin_prompts(self, rows: torch.Tensor, lengths: Sequence[int], continues: bool) -> None:
        """Prepare for prompts of ``rows`` [N], or where it ``continues`` for more tokens of them."""
        self._rows, self._continues = rows, continues
        self._chunks = Chunks.of(lengths, self._taps, rows.device)

    def begin_decode(self, count: int) -> None:
        """Prepare for decode steps of the first rows."""
        self._rows, self._chunks, self._count, self._alive = None, None, count, self._watched

    def of(self, layer: int) -> LayerStates:
        """Return what the ``layer``, counted among those that have states, reads and writes."""
        held = self.past[layer], self.memory[layer]
        if self._chunks is None:
            read = tuple(each[: self._count] for each in held)
        else:
            read = tuple(each[self._rows] for each in held) if self._continues else (None, None)
        return LayerStates(*read, self._alive[: self._count], self._chunks, self._rows, held)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy rows: ``destination[i]`` gets what ``source[i]`` held before any of them was changed."""
        for held in self.tensors:
            held[destination] = held[source]
