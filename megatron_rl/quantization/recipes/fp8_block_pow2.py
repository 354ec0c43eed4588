"""Like fp8_block, with scales rounded up to powers of two (E8M0), as in Transformer Engine's blockwise recipe."""

from __future__ import annotations

from megatron_rl.quantization.recipes.fp8_block import Fp8Block


class Fp8BlockPow2(Fp8Block):
    """A power-of-two scale has no rounding error of its own, but up to half of the code range is unused."""

    name = "fp8_block_pow2"
    format = "fp8 e4m3, 128x128 x 1x128, scales 2^n"
    safer = "fp8_block"
    tile = (128, 128)
    powers_of_two = True


RECIPE = Fp8BlockPow2()
