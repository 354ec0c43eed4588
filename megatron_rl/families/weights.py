"""Mapping of megatron parameters to the tensors of a Hugging Face checkpoint.

One description serves loading and saving: for a tensor-parallel rank, the blocks of tensors that form its part of a
parameter, in row order. Example, a gated MLP of width 6 on the second of two ranks::

    linear_fc1.weight   gate_proj.weight[3:6]
                        up_proj.weight[3:6]
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.blocks import blocks_of
from megatron_rl.families.layout import ModelLayout
from megatron_rl.families.parts import Parameter

if TYPE_CHECKING:
    import torch

Rows = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a parameter from one tensor."""

    tensor: str | None
    """None: zero padding."""
    rows: Rows
    columns: Rows | None = None
    """None: all, or the tensor has no columns."""
    step: int = 1
    """Row stride; 2 where gate and up rows alternate."""
    index: int | None = None
    """Index in a stacked tensor, e.g. the expert."""
    transposed: bool = False
    """The tensor is transposed; rows and columns are the parameter's."""

    @property
    def height(self) -> int:
        """Number of rows that it fills."""
        return -(-(self.rows[1] - self.rows[0]) // self.step)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of the piece in the ``whole`` tensor, in the parameter's orientation."""
        part = whole if self.index is None else whole[self.index]
        part = part.t() if self.transposed else part
        rows = part[slice(*self.rows, self.step)]
        return rows if self.columns is None else rows[:, slice(*self.columns)]


@dataclass(frozen=True)
class Entry:
    """The tensors of a parameter."""

    tensors: dict[str, tuple[int, ...]]
    """Name -> shape."""
    order: tuple[Piece, ...] = field(default=(), repr=False)
    """Rows of the whole parameter; empty: the tensors one after the other."""

    def pieces(self, parameter: Parameter, rank: int = 0) -> list[Piece]:
        """Return the pieces of tensor-parallel ``rank`` in row order, as ``parameter`` is padded and split in this
        layout.
        """
        whole = list(self.order or (Piece(name, (0, shape[0])) for name, shape in self.tensors.items()))
        if parameter.cut == "columns":
            columns = _share((0, parameter.shape[1]), rank, parameter.ranks)
            return [replace(piece, columns=columns) for piece in whole]
        total = sum(piece.height for piece in whole)
        if parameter.shape[0] > total:
            whole.append(Piece(None, (total, parameter.shape[0])))
            total = parameter.shape[0]
        if parameter.cut is None:
            return whole
        height = total // parameter.blocks
        starts = range(0, total, height)
        parts = [_share((start, start + height), rank, parameter.ranks) for start in starts]
        return [piece for part in parts for piece in _cut(whole, *part)]


class WeightMap(dict[str, Entry]):
    """Parameter name (with global layer and expert numbers) -> its tensors."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors of the Hugging Face checkpoint with their shapes."""
        return {name: shape for entry in self.values() for name, shape in entry.tensors.items()}

    @property
    def stacked_matrices(self) -> frozenset[str]:
        """Tensors with a transposed matrix per expert: [E, K, N]."""
        pieces = (piece for entry in self.values() for piece in entry.order)
        return frozenset(piece.tensor for piece in pieces if piece.transposed and piece.index is not None)


def _share(rows: Rows, rank: int, size: int) -> Rows:
    start, total = rows[0], rows[1] - rows[0]
    if total % size:
        raise ValueError(f"{total} rows or columns cannot be shared by {size} ranks")
    return start + total // size * rank, start + total // size * (rank + 1)


def _cut(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield the parts of ``pieces`` in rows ``start`` to ``stop`` of the parameter."""
    offset = 0
    for piece in pieces:
        first, last = max(start, offset), min(stop, offset + piece.height)
        if first < last:
            start_row, end_row = (piece.rows[0] + (row - offset) * piece.step for row in (first, last))
            yield replace(piece, rows=(start_row, min(end_row, piece.rows[1])))
        offset += piece.height


_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head", "final_layernorm": "norm",
    "decoder": "model", "pre_mlp_layernorm": "post_attention_layernorm",
}  # fmt: skip


def decoder_weights(model: Architecture, renamed: Mapping[str, str] = MappingProxyType({})) -> WeightMap:
    """Return the weights by Llama's names, as in all families derived from it; ``renamed``: parts with other names."""
    blocks = [block.names for kind in set(model.kinds) for block in blocks_of(kind)]
    names = ChainMap(dict(renamed), *map(dict, blocks), _NAMES)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b")

    def in_theirs(name: str) -> str:
        return pattern.sub(lambda found: names[found[0]], name)

    return WeightMap({parameter.name: _entry(parameter, in_theirs) for parameter in ModelLayout.of(model).parameters})


def _entry(parameter: Parameter, in_theirs: Callable[[str], str]) -> Entry:
    if not parameter.stripes:
        return Entry({in_theirs(parameter.name): parameter.shape})
    *path, module, last = parameter.name.split(".")
    stripes = [(in_theirs(".".join((*path, name, last))), rows) for name, rows in parameter.stripes]
    height, *width = parameter.shape
    times = height // sum(rows for _, rows in stripes)
    ends: dict[str, int] = {}
    turn = []  # a tensor may own two row ranges per repeat; it stores all first ranges, then all second ones
    for name, rows in stripes:
        turn.append((name, ends.get(name, 0), rows))
        ends[name] = ends.get(name, 0) + times * rows
    order = tuple(
        Piece(name, (start + i * rows, start + (i + 1) * rows)) for i in range(times) for name, start, rows in turn
    )
    return Entry({name: (end, *width) for name, end in ends.items()}, order)
