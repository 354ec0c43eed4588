"""Where the numbers of a megatron parameter lie in the tensors of a Hugging Face checkpoint.

One description serves both ways. It says, for a tensor-parallel rank, which blocks of which tensors its part of
a parameter consists of, from top to bottom. Worked example, a gated MLP of width 6 on the second of two ranks::

    linear_fc1.weight   gate_proj.weight[3:6]
                        up_proj.weight[3:6]
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.blocks import Parameter, blocks_of
from megatron_rl.families.layout import ModelLayout

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
    """The tensors that a parameter is made of."""

    tensors: dict[str, tuple[int, ...]]
    """Name -> shape."""
    order: tuple[Piece, ...] = field(default=(), repr=False)
    """Rows of the whole parameter; without it one tensor after the other."""

    def pieces(self, parameter: Parameter, rank: int = 0) -> list[Piece]:
        """What the part of tensor-parallel rank ``rank`` consists of, from top to bottom.

        ``parameter`` is that of the layout in question: it says how ranks share it, and how many rows it is padded to.
        """
        if parameter.cut == "columns":
            ((name, (rows, columns)),) = self.tensors.items()
            return [Piece(name, (0, rows), _share((0, columns), rank, parameter.ranks))]
        whole = list(self.order or (Piece(name, (0, shape[0])) for name, shape in self.tensors.items()))
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
    """Parameter's name -> what it is made of; layers and experts counted over all ranks."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the Hugging Face checkpoint and its shape."""
        return {name: shape for entry in self.values() for name, shape in entry.tensors.items()}


def _share(rows: Rows, rank: int, size: int) -> Rows:
    start, total = rows[0], rows[1] - rows[0]
    if total % size:
        raise ValueError(f"{total} rows or columns cannot be shared by {size} ranks")
    return start + total // size * rank, start + total // size * (rank + 1)


def _cut(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The part of ``pieces`` that fills rows ``start`` to ``stop`` of the parameter."""
    offset = 0
    for piece in pieces:
        first, last = max(start, offset), min(stop, offset + piece.height)
        if first < last:
            shift = piece.rows[0] - offset
            yield Piece(piece.tensor, (first + shift, last + shift))
        offset += piece.height


_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head", "final_layernorm": "norm",
    "decoder": "model", "pre_mlp_layernorm": "post_attention_layernorm",
}  # fmt: skip


def decoder_weights(model: Architecture, renamed: Mapping[str, str] = MappingProxyType({})) -> WeightMap:
    """In Llama's naming, which all families derived from it share; ``renamed`` are parts that are called otherwise."""
    blocks = [block.names for kind in set(model.kinds) for block in blocks_of(kind)]
    names = ChainMap(dict(renamed), *map(dict, blocks), _NAMES)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b")

    def in_theirs(name: str) -> str:
        return pattern.sub(lambda found: names[found[0]], name)

    return WeightMap({
        parameter.name: _entry(parameter, in_theirs) for parameter in ModelLayout.of(model).parameters
    })


def _entry(parameter: Parameter, in_theirs: Callable[[str], str]) -> Entry:
    if not parameter.stripes:
        return Entry({in_theirs(parameter.name): parameter.shape})
    *path, module, last = parameter.name.split(".")
    stripes = [(in_theirs(".".join((*path, name, last))), rows) for name, rows in parameter.stripes]
    height, *width = parameter.shape
    times = height // sum(rows for _, rows in stripes)
    order = tuple(Piece(name, (i * rows, (i + 1) * rows)) for i in range(times) for name, rows in stripes)
    return Entry({name: (times * rows, *width) for name, rows in stripes}, order)
