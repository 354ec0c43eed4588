"""FP8 E4M3 with one scale per output channel and dynamic scales per token."""

from __future__ import annotations

from megatron_rl.quantization import formats
from megatron_rl.quantization.rowwise import RowRecipe


class Fp8(RowRecipe):
    """The default on GPUs: `thin_product` up to 128 tokens, above ``torch._scaled_mm`` with rowwise scales."""

    name = "fp8"
    format = "fp8 e4m3, channel x token"
    largest = formats.FP8_MAX
    code_type = formats.FP8

    def device_problem(self, capability: tuple[int, int] | None) -> str | None:
        """Require FP8 tensor cores (8.9 and later) and rowwise scales (Hopper and later)."""
        if capability is None or capability >= (9, 0):
            return None
        own = "{}.{}".format(*capability)
        return f"{self.name} needs a GPU of compute capability 9.0 or more and this one is {own}; use int8"


RECIPE = Fp8()
