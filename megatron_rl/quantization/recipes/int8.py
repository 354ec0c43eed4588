"""INT8 with one scale per output channel and dynamic scales per token."""

from __future__ import annotations

import torch

from megatron_rl.quantization import formats
from megatron_rl.quantization.rowwise import RowRecipe


class Int8(RowRecipe):
    """The default on CPUs and on GPUs without FP8. Integer sums do not depend on their order."""

    name = "int8"
    format = "int8, channel x token"
    safer = "int8_smooth"
    largest = formats.INT8_MAX
    code_type = torch.int8


RECIPE = Int8()
