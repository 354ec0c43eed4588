"""INT4 weights, one scale an output channel; activations as they are. A control that must do worse."""

from __future__ import annotations

import torch

from megatron_rl.quantization import formats
from megatron_rl.quantization.recipe import QuantizedWeight, TensorRanks
from megatron_rl.quantization.rowwise import RowRecipe


class Int4(RowRecipe):
    """Not for use: there is no kernel for it here, the codes take a byte each. `examples/fidelity` needs a
    format that is too coarse, to show that its measurements would tell.
    """

    name = "int4"
    format = "int4 weights only, channel"
    safer = "int8"
    largest = formats.INT4_MAX
    code_type = torch.int8
    one_pass = False

    def matmul(self, x: torch.Tensor, q: QuantizedWeight, ranks: TensorRanks | None = None) -> torch.Tensor:
        """See `Recipe.matmul`."""
        weight = q.codes[: q.rows, : q.columns].float() if q.operand is None else q.operand
        product = torch.matmul(x.reshape(-1, q.columns).float(), weight.t()) * q.scales[: q.rows].t()
        if ranks is not None:
            product = ranks.total(product)
        return product.to(x.dtype).view(*x.shape[:-1], q.rows)

    def packing(self, q: QuantizedWeight, ranks: TensorRanks | None) -> None:
        """Activations stay as they are."""

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight, ranks: TensorRanks | None = None) -> torch.Tensor:
        """Unchanged."""
        del q, ranks
        return x


RECIPE = Int4()
