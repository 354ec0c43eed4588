"""Triton kernels of quantised rollouts. Optional: importing this package does not import Triton.

The definition of every number is `megatron_rl.quantization.formats`; the kernels give the same scales to the
bit and the same codes (but for the sign of a zero). The modules below import Triton, so import them only after
`available` said yes:

- `activations`: tokens to codes and scales, by row or by segment of 128;
- `weights`: weights to codes and scales in buffers that stay where they are;
- `int8_matmul`: the product of int8 codes, scaled or as raw int32 accumulators.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


def available() -> bool:
    """True if the kernels can run: Triton is there, and a CUDA device or Triton's interpreter.

    The interpreter (``TRITON_INTERPRET=1`` before Triton's import) runs them on a CPU, for tests.
    """
    return _has_triton() and (os.environ.get("TRITON_INTERPRET") == "1" or _has_cuda())


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
