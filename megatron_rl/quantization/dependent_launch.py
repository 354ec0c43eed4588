"""Programmatic dependent launch: a kernel of a decode step starts while the one before it ends, and then waits for it.

`wait` comes before every load but those of weights, and before every store: memory is used again, so the kernel before
may still read what this one writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

DEPENDENT_LAUNCHES = False
"""Whether rollouts use it: not until tests/gpu/test_gpu_graphs.py has shown equal tokens, and a benchmark a gain."""


def dependent() -> dict[str, Any]:
    """Return the arguments that launch a kernel with `wait` so; none in training, and before Hopper."""
    if not (DEPENDENT_LAUNCHES and torch.is_inference_mode_enabled()) or torch.cuda.get_device_capability() < (9, 0):
        return {}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the end of the kernel before; then the next one may start."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch(lines):
    """Bring the 128 bytes at each of ``lines`` into the L2 cache."""
    text: tl.constexpr = "prefetch.global.L2 [$1]; // no result $0"
    tl.inline_asm_elementwise(text, "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
