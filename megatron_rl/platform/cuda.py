"""torch settings on CUDA: attention kernels, allocator, determinism."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The user's settings of torch's allocator."""


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Apply both settings. Call once, before the first allocation on a GPU; needs no GPU."""
    # On Hopper torch prefers cuDNN attention, which builds and keeps a plan for every new shape, in tens of
    # milliseconds forward and backward: packed batches have new shapes in every step. Its backward pass also gives NaN
    # under a mask where length % 128 == 64 (pytorch issue 196678). Flash attention is the next choice.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # KV cache, optimizer state and weights are freed and reallocated in every step. Segments of a fixed size would
    # fragment.
    if not any(environment.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def environment_for(batch_invariant: bool) -> dict[str, str]:
    """Return the environment variables of deterministic mode, to be set before the first GPU call or process group.

    With ``batch_invariant`` cuBLAS has no workspace for split-K, whose use depends on the number of rows.
    """
    return {
        "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0",  # one order of sums; NVSwitches have none
        "CUBLAS_WORKSPACE_CONFIG": ":16:8" if batch_invariant else ":4096:8",  # torch's strict mode refuses others
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine
        **({"CUBLASLT_WORKSPACE_SIZE": "0"} if batch_invariant else {}),
    }  # fmt: skip


@contextlib.contextmanager
def strict_algorithms() -> Iterator[None]:
    """Use deterministic algorithms, and raise where there is none, inside the context.

    Affects flash attention's backward pass, ``scatter_add_``, ``index_add_`` and ``index_copy_``.
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
    """Make GEMMs sum over K in order for any number of rows. Call before the first one, with `environment_for`."""
    torch.backends.cuda.preferred_blas_library("cublaslt")  # which alone knows the second setting
    for dtype in ("bf16", "fp16"):  # neither sums in the dtype, nor split-K
        setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", (False, False))
