"""What torch is told before it computes on CUDA: which kernels to leave alone, and how to keep memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user configures torch's allocator."""


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Apply both settings. Call once, before the first allocation on a GPU; it needs none itself."""
    # On Hopper torch prefers cuDNN's attention, which builds a plan for every new shape, tens of milliseconds forward
    # and backward, and keeps it for ever: packed batches have new shapes in every step. Besides, its backward pass
    # gives NaN under a mask where length % 128 == 64 (pytorch issue 196678). Flash attention comes next.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The KV cache, optimizer state and weights leave the device and come back in every step. Between segments of a
    # fixed size they would leave holes that nothing else fits in.
    if not any(environment.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
