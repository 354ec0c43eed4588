"""FP8 E4M3 with 128 x 128 tiles and 1 x 128 segments: the format of DeepSeek's checkpoints."""

from __future__ import annotations

from megatron_rl.quantization.tiled import TiledRecipe


class Fp8Block(TiledRecipe):
    """Scales are any fp32 number."""

    name = "fp8_block"
    format = "fp8 e4m3, 128x128 x 1x128"
    safer = "none"
    powers_of_two = False


RECIPE = Fp8Block()
