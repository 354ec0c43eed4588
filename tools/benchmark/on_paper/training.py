"""A training micro-batch on one H200, on paper: forward and backward pass of 8,192 tokens in sequences of 2,048.

    python -m tools.benchmark.on_paper.training  prints a table of docs/measurements/on_paper.md; nothing measured

The floor is the arithmetic of products and attention at the peak that a bf16 product reached on such a machine; a
product of fp8 counts half. Expected is the sum of: products and attention at the rates that kernels reach, what layers
read and write between them, log-probs with 12 bytes a logit (`algorithms/logprob_kernels.py`: read, read again and
written over by their gradient, 2 bytes each, and the head's gradient beside them), and the passes of fp8's quantizer.
"""

from __future__ import annotations

import sys

from megatron_rl.metrics.console import print_table
from tools.benchmark.on_paper.decode import MODELS, RATE
from tools.benchmark.on_paper.seconds import forward_flops
from tools.benchmark.on_paper.sizes import Model

TOKENS, LENGTH = 8192, 2048
PEAK = 790e12
"""FLOP/s of a bf16 product."""
PRODUCTS = {"0.5B": 480e12, "7B": 650e12}
"""FLOP/s of a model's products in bf16, and half of what they reach in fp8."""
ATTENTION = 350e12
BESIDE_MLP, GATE = 3 * 52, 16
"""Bytes a token, both passes: of norms, residuals and heads per hidden number; of SwiGLU's kernels per channel."""
LOGIT = 12
FORMS = {"bf16": 0, "fp8 forward": 1, "fp8 both": 3}
"""Of the three products of a linear (forward, dX, dW), those in fp8."""
QUANTISED = {"bf16": 0, "fp8 forward": 3, "fp8 both": 3 + 3 + 6}
"""Bytes per number of inputs and outputs that quantisers read and write: 2 + 1 each time, twice more for dW."""


def training(model: Model, form: str) -> tuple[float, float]:
    """Seconds of the arithmetic, and expected seconds."""
    numbers = model.layers * (model.attention + model.dense)
    scores = 3 * TOKENS * (forward_flops(model, LENGTH)[0] - 2 * model.active_numbers)
    linears, head, fp8 = 6 * TOKENS * numbers, 6 * TOKENS * model.head, FORMS[form] / 3
    work = linears * (1 - fp8 / 2)
    floor = (work + head + scores) / PEAK
    width = model.dense / (3 * model.hidden)
    moved = model.layers * TOKENS * (BESIDE_MLP * model.hidden + GATE * width)
    moved += model.layers * TOKENS * QUANTISED[form] * (5 * model.hidden + 3 * width)  # in and out of its linears
    moved += LOGIT * TOKENS * model.head / model.hidden
    return floor, (work + head) / PRODUCTS[model.name] + scores / ATTENTION + moved / RATE


def rows() -> list[tuple[str, ...]]:
    """A row of the table for each model and format."""
    found = []
    for model in (model for model, *_ in MODELS if model.name in PRODUCTS):
        for form in FORMS:
            floor, time = training(model, form)
            found.append((f"{model.name} {form}", f"{floor * 1e3:.0f}", f"{time * 1e3:.0f}", f"{time / floor:.1f}"))
    return found


if __name__ == "__main__":
    print_table(sys.stdout, ("ms", "arithmetic", "expected", "ratio"), rows())
