"""Where the numbers of a megatron parameter lie in the tensors of a Hugging Face checkpoint.

One description serves both ways. It says, for a tensor-parallel rank, which blocks of which tensors its part of
a parameter consists of, from top to bottom. Worked example, a gated MLP of width 6 on the second of two ranks::

    linear_fc1.weight   gate_proj.weight[3:6]
                        up_proj.weight[3:6]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Rows = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor that lie side by side in a parameter too."""

    tensor: str | None
    """None: no tensor has them, they are padding and zero."""
    rows: Rows
    columns: Rows | None = None
    """None: all of them, or there are none."""

    @property
    def height(self) -> int:
        """How many rows it fills."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class Entry:
    """One parameter and the tensors it is made of."""

    parameter: str
    """Name in the whole model: layers and experts counted over all ranks."""
    tensors: dict[str, tuple[int, ...]]
    """Name -> shape."""
    split: Literal["none", "rows", "columns", "each", "vocabulary"]
    """How tensor-parallel ranks share it.

    ``none``: each has all. ``rows``: the parameter's rows in equal parts. ``each``: the rows of each tensor by
    themselves. ``columns``: the columns. ``vocabulary``: rows, padded with zeros first.
    """
    order: tuple[Piece, ...] = field(default=(), repr=False)
    """Rows of the whole parameter; without it one tensor after the other."""

    def pieces(self, rank: int = 0, size: int = 1, padded_vocabulary: int = 0) -> list[Piece]:
        """What the part of tensor-parallel rank ``rank`` of ``size`` consists of, from top to bottom."""
        if self.split == "columns":
            ((name, (rows, columns)),) = self.tensors.items()
            return [Piece(name, (0, rows), _share(columns, rank, size))]
        if self.split == "each":
            return [Piece(name, _share(shape[0], rank, size)) for name, shape in self.tensors.items()]
        whole = list(self.order or (Piece(name, (0, shape[0])) for name, shape in self.tensors.items()))
        if self.split == "none":
            return whole
        total = sum(piece.height for piece in whole)
        if self.split == "vocabulary" and padded_vocabulary > total:
            whole.append(Piece(None, (total, padded_vocabulary)))
            total = padded_vocabulary
        return list(_cut(whole, *_share(total, rank, size)))


class WeightMap:
    """All entries of a model, by parameter; the order is that of the Hugging Face format."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: tuple[Entry, ...] = tuple(entries)
        self._by_parameter = {entry.parameter: entry for entry in self.entries}

    def __getitem__(self, parameter: str) -> Entry:
        return self._by_parameter[parameter]

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._by_parameter

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the Hugging Face checkpoint and its shape."""
        return {name: shape for entry in self.entries for name, shape in entry.tensors.items()}


def interleaved(names: Sequence[str], group_rows: Sequence[int], groups: int) -> tuple[Piece, ...]:
    """Query, key and value of the first group, then those of the second, and so on."""
    return tuple(
        Piece(name, (group * rows, (group + 1) * rows))
        for group in range(groups)
        for name, rows in zip(names, group_rows, strict=True)
    )


def _share(total: int, rank: int, size: int) -> Rows:
    if total % size:
        raise ValueError(f"{total} rows or columns cannot be shared by {size} ranks")
    return total // size * rank, total // size * (rank + 1)


def _cut(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The part of ``pieces`` that fills rows ``start`` to ``stop`` of the parameter."""
    offset = 0
    for piece in pieces:
        first, last = max(start, offset), min(stop, offset + piece.height)
        if first < last:
            shift = piece.rows[0] - offset
            yield Piece(piece.tensor, (first + shift, last + shift))
        offset += piece.height
