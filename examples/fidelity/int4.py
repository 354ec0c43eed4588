"""A quantisation recipe of one's own: INT4 weights, one scale an output channel; activations as they are.

    train_rl.py ... --rl-rollout-quantization examples/fidelity/int4.py:RECIPE
"""

from __future__ import annotations

import torch

from megatron_rl.quantization.recipe import QuantizedWeight, Recipe
from megatron_rl.quantization.rowwise import RowRecipe


class Int4(RowRecipe):
    """The control that must do worse: a format that is too coarse shows that the study's measurements would tell.

    There is no kernel for it, the codes take a byte each.
    """

    name = "int4"
    format = "int4 weights only, channel"
    safer = "int8"
    largest = 7.0
    code_type = torch.int8
    one_pass = False

    def matmul(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.matmul`."""
        weight = q.codes[: q.rows, : q.columns].float() if q.operand is None else q.operand
        product = torch.matmul(x.reshape(-1, q.columns).float(), weight.t()) * q.scales[: q.rows].t()
        return product.to(x.dtype).view(*x.shape[:-1], q.rows)

    grouped_matmul = Recipe.grouped_matmul  # `RowRecipe` quantises activations in its own

    def packing(self, q: QuantizedWeight) -> None:
        """Activations stay as they are."""

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """Unchanged."""
        return x


RECIPE = Int4()
