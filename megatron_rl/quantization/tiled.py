"""Recipes with one scale a 128 x 128 tile of the weight and one a 1 x 128 segment of the activations.

The format of DeepSeek's FP8 checkpoints and, with powers of two, of Transformer Engine's blockwise scaling.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from megatron_rl.quantization import formats, kernels, products
from megatron_rl.quantization.formats import TILE
from megatron_rl.quantization.recipe import PackedActivations, Packing, QuantizedWeight, Ranks, Recipe, Split
from megatron_rl.quantization.storage import stored_shape, tile_problem


class TiledRecipe(Recipe):
    """What fp8_block and fp8_block_pow2 have in common."""

    powers_of_two: ClassVar[bool]

    def device_problem(self, capability: tuple[int, int] | None) -> str | None:
        """Blockwise products exist for Hopper."""
        if capability is not None and capability[0] != 9:
            return (
                f"{self.name} needs a GPU of compute capability 9 (Hopper) and this one is "
                f"{capability[0]}.{capability[1]}; use fp8 or int8"
            )
        return None

    def shape_problem(self, rows: int, columns: int, split: Split | None) -> str | None:
        """See ``tile_problem``."""
        return tile_problem(rows, columns, split)

    # -- the weight ----------------------------------------------------------------------------

    def shares_amax(self, split: Split) -> bool:
        """Tiles lie within one rank: ``shape_problem`` sees to it."""
        del split
        return False

    def amax(self, weight: torch.Tensor, smoothing: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [ceil(N / 128), 1, ceil(K / 128), 1]."""
        del smoothing
        return formats.tiles(weight).abs().amax((1, 3), keepdim=True).float()

    def allocate(self, rows: int, columns: int, device: torch.device) -> QuantizedWeight:
        """See `Recipe.allocate`."""
        stored = stored_shape(self.name, rows, columns)
        tiles = stored[0] // TILE, stored[1] // TILE
        q = QuantizedWeight(
            codes=torch.zeros(stored, dtype=formats.FP8, device=device),
            scales=torch.ones(tiles, device=device),
            rows=rows,
            columns=columns,
        )
        if device.type == "cuda":
            q.operand = torch.zeros(tiles[0], -(-tiles[1] // 4) * 4, device=device)
            q.scales = q.operand[:, : tiles[1]]  # one buffer: cuBLAS wants the columns padded to four
        else:
            q.operand = torch.zeros(rows, columns, device=device)
        return q

    def encode(self, weight: torch.Tensor, amax: torch.Tensor | None, into: QuantizedWeight) -> None:
        """See `Recipe.encode`."""
        if weight.is_cuda and kernels.available():
            from megatron_rl.quantization.kernels.weights import requantize_tiles

            requantize_tiles(weight, into.codes, into.scales, power_of_two=self.powers_of_two)
            return
        cut = formats.tiles(weight.float())
        amax = self.amax(weight) if amax is None else amax
        scale = self._scale(amax)
        # Rounded before the cast: a CPU converts fp8 element by element, and the operand wants the numbers.
        codes = formats.fp8_rounded((cut / scale).clamp_(-formats.FP8_MAX, formats.FP8_MAX))
        into.codes.copy_(codes.reshape(into.codes.shape))
        into.scales.copy_(scale.view(into.scales.shape))
        if not weight.is_cuda:
            into.operand.copy_((codes * scale).reshape(into.codes.shape)[: into.rows, : into.columns])

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        scale = formats.scale_of(amax, formats.FP8_MAX)
        return formats.power_of_two(scale) if self.powers_of_two else scale

    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.dequantize`."""
        weight = formats.tiles(q.codes.float()) * q.scales[:, None, :, None]
        return weight.reshape(q.codes.shape)[: q.rows, : q.columns]

    # -- the product ---------------------------------------------------------------------------

    def matmul(
        self,
        x: torch.Tensor,
        q: QuantizedWeight,
        bias: torch.Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> torch.Tensor:
        """See `Recipe.matmul`."""
        tokens = x.reshape(-1, q.columns)
        if x.is_cuda:
            codes, scales = self._packed_activations(tokens, q)
            exact = ranks is not None or bias is not None  # fp32 for sums; else no cast there and back
            product = products.fp8_tile_product(codes, scales, q, torch.float32 if exact else x.dtype)
        else:
            product = torch.mm(self.round_trip(tokens.float(), q), q.operand.t())
        if ranks is not None:
            product = ranks.total(product)
        if bias is not None:
            product = product + bias
        return product.to(x.dtype).view(*x.shape[:-1], q.rows)

    def packing(self, q: QuantizedWeight, ranks: Ranks | None) -> Packing | None:
        """See `Recipe.packing`."""
        if ranks is not None:  # their products are added up in fp32
            return None
        return Packing(formats.FP8, q.codes.shape[1], in_segments=True, power_of_two=self.powers_of_two)

    def multiply(self, x: PackedActivations, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.multiply`."""
        return products.fp8_tile_product(x.codes, x.scales, q, x.dtype)

    def _segments(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values / scale [T, S, 128] fp32, and the scales [T, S, 1]."""
        cut = formats.segments(tokens.float())
        scale = self._scale(formats.row_amax(cut))
        return cut / scale, scale  # past the limit by an ulp at most: rounding takes it back

    def _packed_activations(
        self, tokens: torch.Tensor, q: QuantizedWeight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if kernels.available():
            from megatron_rl.quantization.kernels.activations import quantize_segments

            return quantize_segments(tokens, power_of_two=self.powers_of_two)
        scaled, scale = self._segments(tokens)
        return formats.fp8_rounded(scaled).flatten(1).to(formats.FP8), scale[..., 0]

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight, ranks: Ranks | None = None) -> torch.Tensor:
        """See `Recipe.round_trip`."""
        del ranks  # segments lie within one rank
        scaled, scale = self._segments(x.reshape(-1, q.columns))
        values = (formats.fp8_rounded(scaled) * scale).flatten(1)[:, : q.columns]
        return values.to(x.dtype).view(x.shape)
