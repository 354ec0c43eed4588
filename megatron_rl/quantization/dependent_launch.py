"""Programmatic dependent launch: a kernel of a decode step starts while the previous one ends, then waits for it.

`wait` comes before all loads except those of weights, and before all stores: memory is reused, so the previous kernel
may still read it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

DEPENDENT_LAUNCHES = False
"""Whether rollouts use it: off until tests/gpu/test_gpu_graphs.py shows equal tokens, and a benchmark a gain."""


def dependent() -> dict[str, Any]:
    """Return the launch arguments for kernels that use `wait`; empty in training, and before Hopper."""
    if not (DEPENDENT_LAUNCHES and torch.is_inference_mode_enabled()) or torch.cuda.get_device_capability() < (9, 0):
        return {}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the end of the previous kernel; then allow the next one to start."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch(lines):
    """Load the 128 bytes at each of ``lines`` into the L2 cache."""
    text: tl.constexpr = "prefetch.global.L2 [$1]; // no result $0"
    tl.inline_asm_elementwise(text, "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
