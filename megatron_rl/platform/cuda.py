"""What torch is told on CUDA: which kernels to leave alone, how to keep memory, and in which modes to repeat bits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

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


def environment_for(batch_invariant: bool) -> dict[str, str]:
    """Return the deterministic mode's variables. Libraries read them once, at their first call on a GPU or of a group.

    With ``batch_invariant`` cuBLAS has no memory for split-K, which it would choose by the number of rows.
    """
    return {
        "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0",  # one order of sums; NVSwitches have none
        "CUBLAS_WORKSPACE_CONFIG": ":16:8" if batch_invariant else ":4096:8",  # torch's strict mode refuses others
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine
        **({"CUBLASLT_WORKSPACE_SIZE": "0"} if batch_invariant else {}),
    }  # fmt: skip


@contextlib.contextmanager
def strict_algorithms() -> Iterator[None]:
    """Let torch use deterministic algorithms in the block, and raise where an operation has none; then as before.

    Flash attention's backward pass, ``scatter_add_``, ``index_add_`` and ``index_copy_`` follow it.
    """
    debug_mode, memory = torch.get_deterministic_debug_mode(), torch.utils.deterministic
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False  # else `torch.empty` is filled
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(debug_mode)
        memory.fill_uninitialized_memory = filled


def forbid_split_k() -> None:
    """Let every number of a GEMM add up its products in the order of K, however many rows there are.

    Call it before the first GEMM; `environment_for` has the variables that go with it.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")  # which alone knows the second setting
    for dtype in ("bf16", "fp16"):  # neither sums in the dtype, nor split-K
        setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", (False, False))
