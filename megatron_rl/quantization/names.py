"""Which linear layers a pattern names. No torch here."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

_EDGE = re.compile(r"(first|last):(\d+)")


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
