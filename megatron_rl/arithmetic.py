"""Numbers that do not depend on what else is in the batch: sizes of products, strict additions, counted random numbers.

Imported with the package: no torch here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FEWEST_ROWS = 4
"""Matrix products with fewer rows take another CPU kernel, which adds up in another order."""
FEWEST_KEYS = 16
"""The same for the keys of a softmax and of its products; masked keys fill the row up, and the KV cache has room for
them."""
TILE = 128
"""Rows and columns of a quantised weight that share a scale, and inputs of a token."""
PRODUCT_ELEMENTS = 2**27
"""Logits of the fused output layer made at a time: 256 MiB in bf16, 880 rows of a vocabulary of 152,000. Not tuned."""
FEWEST_LOGIT_ROWS = 64
"""Of such a product, however large the vocabulary: fewer would read the whole weight for next to nothing."""
# Constants of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed 64-bit integers.
GAMMA = -7046029254386353131
MIX_1 = -4658895280553007687
MIX_2 = -7723592293110705685
POSITION = -2401053089206453570
_CPU_FACTS = Path("/proc/cpuinfo")


def ask_for_strict_products(cpu_facts: Path = _CPU_FACTS) -> None:
    """Set ``MKL_CBWR`` unless the user has; MKL reads it at the first product of the process.

    Without it MKL orders the additions of a product by its number of rows, so the log-prob of a token would depend on
    what else is decoded at the moment, and engine and trainer would differ (decision 001). Strict costs nothing
    there. On other CPUs the same word could mean MKL's slowest kernels, and the default is independent already.
    """
    try:
        is_intel = "GenuineIntel" in cpu_facts.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux: then it is what MKL makes of it
        return
    if is_intel:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return fp32 numbers in (0, 1], a function of ``seeds`` [N] int64 and ``positions`` [N] int64 only."""
    state = seeds * GAMMA + (positions + 1) * POSITION
    state = (state ^ _shift(state, 30)) * MIX_1
    state = (state ^ _shift(state, 27)) * MIX_2
    bits = (state ^ _shift(state, 31)) & ((1 << 24) - 1)
    return (bits.float() + 0.5) * 2.0**-24


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch shifts signed integers arithmetically."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
