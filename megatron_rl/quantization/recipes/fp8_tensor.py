"""FP8 E4M3 with a single scale for the whole weight and dynamic scales per token."""

from __future__ import annotations

import torch

from megatron_rl.quantization import formats
from megatron_rl.quantization.recipes.fp8 import Fp8


class Fp8Tensor(Fp8):
    """The coarsest recipe, used by engines that quantise checkpoints while loading.

    Activation scales are per token, not per batch: otherwise a token's log-prob would depend on the rest of the batch,
    and no trainer could reproduce it. As in those engines, each tensor-parallel rank has its own scale.
    """

    name = "fp8_tensor"
    format = "fp8 e4m3, tensor x token"
    safer = "fp8"
    one_pass = False

    def amax(self, weight: torch.Tensor) -> torch.Tensor:
        """Return fp32 [N, 1], all equal."""
        return formats.row_amax(weight.reshape(1, -1)).expand(weight.shape[0], 1).contiguous()


RECIPE = Fp8Tensor()
