"""Attention over a packed batch of very different lengths: similar ones are padded together.

One set of padded rows is as long as the longest sequence. Of a rollout's samples, half are often
a quarter as long, and their padding was most of the attention's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.attention.padded import PaddedRows
from megatron_rl.attention.product import FEWEST_KEYS

BUCKET_CELLS = 8192
"""Cells of rows x keys that must be saved to pay for one more call: a layer's forward and backward pass
spend about 0.3 ms on the operations around a call, and 0.03 us on a cell of four heads."""
MAX_BORDERS = 32
"""Places between two sequences that are looked at; more would cost more time than they save."""


@dataclass(frozen=True)
class Buckets:
    """Neighbouring sequences of a packed batch, padded together.

    Worked example, lengths (6, 5, 2, 2): `packing.bins.pack` puts the longest first::

        one set of rows             4 rows of 6
        buckets (6, 5) and (2, 2)   2 rows of 6, 2 rows of 2
    """

    rows: tuple[PaddedRows, ...]
    tokens: tuple[int, ...]
    """Packed tokens of each bucket."""

    @classmethod
    def build(cls, lengths: Sequence[int], cu_seqlens: torch.Tensor, position_ids: torch.Tensor) -> Buckets:
        """See `PackedKernel.prepare`."""
        borders = cheapest_borders(lengths)
        first, tokens, rows = 0, [], []
        for start, end in zip(borders, borders[1:], strict=False):
            tokens.append(sum(lengths[start:end]))
            positions = position_ids[first : first + tokens[-1]]
            rows.append(PaddedRows.build(lengths[start:end], cu_seqlens[start : end + 1] - first, positions))
            first += tokens[-1]
        return cls(tuple(rows), tuple(tokens))


def cheapest_borders(lengths: Sequence[int]) -> list[int]:
    """Where to cut ``lengths``: ``[0, .., len(lengths)]`` with the least padded work.

    Sequences stay in their order, so it pays where similar lengths are neighbours. A bucket costs
    ``rows x longest^2 + BUCKET_CELLS``; the best cuts among up to `MAX_BORDERS` places where the length changes.
    """
    places = [i for i in range(1, len(lengths)) if lengths[i] != lengths[i - 1]]
    stride = -(-len(places) // MAX_BORDERS) or 1
    borders = [0, *places[::stride], len(lengths)]
    longest = [max(lengths[a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    cost, cut_before = [0.0], [0]
    for end in range(1, len(borders)):
        widest, best = FEWEST_KEYS, (float("inf"), 0)
        for start in range(end - 1, -1, -1):
            widest = max(widest, longest[start])
            work = (borders[end] - borders[start]) * widest**2 + BUCKET_CELLS
            best = min(best, (cost[start] + work, start))
        cost.append(best[0])
        cut_before.append(best[1])
    chosen, place = [], len(borders) - 1
    while place:
        chosen.append(borders[place])
        place = cut_before[place]
    return [0, *reversed(chosen)]
