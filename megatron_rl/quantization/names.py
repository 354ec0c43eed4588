"""Which linear layers a model has, by flags alone, and which of them a pattern names. No torch here."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.config import RLConfig

_EDGE = re.compile(r"(first|last):(\d+)")


@dataclass(frozen=True)
class LinearShape:
    """One linear layer as a tensor-parallel rank holds it."""

    name: str
    """``layers.0.mlp.linear_fc1``, layers counted from 0 over the whole model."""
    rows: int
    """Outputs of this rank."""
    columns: int
    """Inputs of this rank."""
    splits_inputs: bool
    """True where the ranks share the inputs (row-parallel), False where they share the outputs."""
    unit_rows: int
    """Outputs that lie side by side in the whole weight too: a gated fc1 is gate and up, each cut by itself."""


def quantizable_linears(config: RLConfig) -> list[LinearShape]:
    """The linears of every decoder layer of a resolved configuration, in the model's order."""
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    query = model.num_attention_heads * model.kv_channels // parts
    # With fewer groups than ranks a rank stores part of a group, which megatron gathers after the product.
    key = model.num_query_groups * model.kv_channels // parts
    hidden, gated = model.hidden_size, 2 if model.swiglu else 1
    if model.num_experts is None:
        mlps, inner = ["mlp"], model.ffn_hidden_size // parts
    else:
        mlps = [f"mlp.experts.local_experts.{expert}" for expert in range(model.num_experts)]
        inner = model.moe_ffn_hidden_size // parts
    shapes = [
        ("self_attention.linear_proj", hidden, query, True, hidden),
        ("self_attention.linear_qkv", query + 2 * key, hidden, False, query + 2 * key),
    ]
    for mlp in mlps:
        shapes.append((f"{mlp}.linear_fc1", gated * inner, hidden, False, inner))
        shapes.append((f"{mlp}.linear_fc2", hidden, inner, True, hidden))
    return [
        LinearShape(f"layers.{layer}.{name}", *shape) for layer in range(model.num_layers) for name, *shape in shapes
    ]


def skipped(name: str, patterns: Sequence[str], num_layers: int) -> bool:
    """True if one of the patterns names the layer.

    A pattern is a shell pattern (``layers.0.*``, ``*.linear_fc2``), ``first:N`` or ``last:N`` layers.
    """
    return any(_matches(name, pattern, num_layers) for pattern in patterns)


def unmatched_patterns(patterns: Sequence[str], names: Iterable[str], num_layers: int) -> list[str]:
    """The patterns that name none of the layers."""
    names = list(names)
    return [p for p in patterns if not any(_matches(name, p, num_layers) for name in names)]


def _matches(name: str, pattern: str, num_layers: int) -> bool:
    edge = _EDGE.fullmatch(pattern)
    if edge is None:
        return fnmatch.fnmatchcase(name, pattern)
    index, count = int(name.split(".")[1]), int(edge[2])
    return index < count if edge[1] == "first" else index >= num_layers - count
