"""LoRA adapters: adapted matrices and their parts, without torch.

W' = W + s B A (arXiv 2106.09685), s = alpha / rank. A fused linear is several matrices in the files of Hugging Face and
PEFT: it has an A [rank, inputs] for each of them, stacked, and a single B [outputs, rank]. Every row of a linear
belongs to one matrix, so B is split, loaded and exported like the weight's rows. Example, gate and up projection of
width 3 with rank 2, 4 inputs::

    A [4, 4]   2 rows of gate_proj, 2 of up_proj        B [6, 2]   3 rows of gate_proj, 3 of up_proj
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.families.blocks import blocks_of
from megatron_rl.families.layout import Layer, ModelLayout
from megatron_rl.families.parts import Linear, Parameter

GROUPS = ("all", "attention", "mlp", "experts")
"""Targets for several linears; ``mlp`` does not include routed experts."""


@dataclass(frozen=True)
class Lora:
    """The adapters of a model."""

    rank: int
    """An expert, one of k per token, has rank / k, at least 1."""
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0


@dataclass(frozen=True)
class LowRank:
    """The adapter of one linear, or of one expert's linear."""

    linear: Linear
    matrices: tuple[str, ...]
    """The linear's matrices by Hugging Face name, in row order: q_proj, k_proj, v_proj."""
    adapted: tuple[str, ...]
    """Matrices with an A."""
    rank: int
    scale: float

    @property
    def a(self) -> Parameter:
        """[adapted matrices x rank, inputs]."""
        shape, cut = (len(self.adapted) * self.rank, self.linear.inputs), "columns" if self._is_row else None
        return Parameter(f"decoder.{self.linear.name}.adapter.lora_a", shape, cut, self.linear.ranks)

    @property
    def b(self) -> Parameter:
        """[outputs, rank], in the order of the weight's rows."""
        linear, cut = self.linear, None if self._is_row else "rows"
        name, shape = f"decoder.{linear.name}.adapter.lora_b", (linear.outputs, self.rank)
        return Parameter(name, shape, cut, linear.ranks, linear.blocks, linear.stripes)

    @property
    def _is_row(self) -> bool:
        return self.linear.kind == "row"

    @property
    def owners(self) -> list[tuple[int, int]]:
        """Rows of B in order: (index in ``adapted`` or -1, number of rows)."""
        stripes = self.linear.stripes or ((self.matrices[0], self.linear.outputs),)
        place = {name: index for index, name in enumerate(self.adapted)}
        times = self.linear.outputs // sum(rows for _, rows in stripes)
        return [(place.get(name, -1), rows) for name, rows in stripes] * times

    @property
    def narrowest(self) -> tuple[str, int]:
        """The adapted matrix with the lowest possible rank, and that rank: its smaller dimension."""
        rows = dict.fromkeys(self.adapted, 0)
        for place, count in self.owners:
            if place >= 0:
                rows[self.adapted[place]] += count
        return min(((name, min(count, self.linear.inputs)) for name, count in rows.items()), key=lambda it: it[1])


def adapters_of(layout: ModelLayout, lora: Lora) -> list[LowRank]:
    """Return one rank's adapters, in the order of the layout's linears."""
    top_k = layout.architecture.moe_router_topk
    return [
        LowRank(linear, matrices, adapted, rank, lora.alpha / rank)
        for layer in layout.layers
        for linear, matrices in _matrices(layer)
        if (adapted := _adapted(linear, matrices, lora.targets))
        for rank in [max(1, lora.rank // top_k) if ".experts." in linear.name else lora.rank]
    ]


def known_targets(layout: ModelLayout) -> list[str]:
    """Return all valid targets: the model's groups, megatron's linears, Hugging Face's matrices."""
    found = dict.fromkeys(("all",))
    for layer in layout.layers:
        for linear, matrices in _matrices(layer):
            found |= dict.fromkeys((_group(linear), _own_name(linear), *matrices))
    return list(found)


def _matrices(layer: Layer) -> Iterator[tuple[Linear, tuple[str, ...]]]:
    names = ChainMap(*(dict(block.names) for block in blocks_of(layer.kind)))
    for linear in layer.linears:
        own = _own_name(linear)
        yield linear, tuple(dict(linear.stripes)) or (names.get(own, own),)


def _adapted(linear: Linear, matrices: tuple[str, ...], targets: tuple[str, ...]) -> tuple[str, ...]:
    if {"all", _group(linear), _own_name(linear)} & set(targets):
        return matrices
    return tuple(name for name in matrices if name in targets)


def _group(linear: Linear) -> str:
    if ".experts." in linear.name:
        return "experts"
    return "attention" if ".self_attention." in linear.name else "mlp"


def _own_name(linear: Linear) -> str:
    return linear.name.rpartition(".")[2]
