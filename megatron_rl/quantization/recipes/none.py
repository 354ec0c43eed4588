"""No quantisation: the reference that the others are compared with."""

from __future__ import annotations

import torch

from megatron_rl.quantization.recipe import QuantizedWeight, Ranks, Recipe, Split


class NoQuantization(Recipe):
    """A copy of the weight, in fp32. Runs never build it: unquantised rollouts use the parameters themselves."""

    name = "none"
    format = "full precision"
    safer = None

    def shares_amax(self, split: Split) -> bool:
        """There are no scales."""
        del split
        return False

    def amax(self, weight: torch.Tensor, smoothing: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [N, 1], only looked at for NaN."""
        del smoothing
        return weight.abs().amax(-1, keepdim=True).float()

    def allocate(self, rows: int, columns: int, device: torch.device) -> QuantizedWeight:
        """See `Recipe.allocate`."""
        return QuantizedWeight(
            torch.zeros(rows, columns, device=device), torch.ones(rows, 1, device=device), rows, columns
        )

    def encode(self, weight: torch.Tensor, amax: torch.Tensor | None, into: QuantizedWeight) -> None:
        """See `Recipe.encode`."""
        del amax
        into.codes.copy_(weight)

    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.dequantize`."""
        return q.codes.clone()

    def matmul(
        self,
        x: torch.Tensor,
        q: QuantizedWeight,
        bias: torch.Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> torch.Tensor:
        """See `Recipe.matmul`."""
        product = torch.matmul(x, q.codes.to(x.dtype).t())
        if ranks is not None:
            product = ranks.total(product)
        return product if bias is None else product + bias

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight, ranks: Ranks | None = None) -> torch.Tensor:
        """Unchanged."""
        del q, ranks
        return x


RECIPE = NoQuantization()
