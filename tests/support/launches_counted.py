"""How many kernels a piece of rollout code launches on a GPU, counted without one.

Everything runs on the meta device, which claims to be CUDA while it is counted: an operator of torch that computes
something is a kernel, and so is a launch of one of our Triton kernels. Views and allocations launch nothing. Ranks
exchange nothing: their collectives are counted.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = (
    "megatron_rl.algorithms.logprob_kernels",
    "megatron_rl.inference.sampling_kernel",
    "megatron_rl.inference.state_kernels",
    "megatron_rl.models.attention.extend",
    "megatron_rl.models.attention.kernels",
    "megatron_rl.models.expert_kernels",
    "megatron_rl.models.kernels",
    "megatron_rl.models.training_kernels",
    "megatron_rl.quantization.grouped_kernels",
    "megatron_rl.quantization.kernels",
    "megatron_rl.quantization.thin_kernels",
)
"""Modules of ours with Triton kernels."""
_VIEWS_OR_COPIES = {"to", "reshape", "contiguous", "flatten"}
_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "detach"}


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        result = function(*args, **kwargs or {})
        # Some views are copies at times: `to` another dtype, `reshape` of what is not contiguous.
        is_copy = name in _VIEWS_OR_COPIES and not torch._C._is_alias_of(args[0], result)
        if is_copy or not (function.is_view or name in _FREE):
            self._seen[name] += 1
        return result


class Kernel:
    """In the place of a Triton kernel."""

    def __init__(self, name: str, seen: Counter[str]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: Any) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            self._seen[self._name] += 1

        return launch


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, launches are counted by name."""
    from triton.runtime.jit import KernelInterface

    from megatron_rl.quantization.recipes import fp8_block

    seen: Counter[str] = Counter()

    def product(codes: torch.Tensor, scales: Any, q: Any, dtype: torch.dtype) -> torch.Tensor:
        seen["scaled_mm"] += 1
        return torch.empty(codes.shape[0], q.rows, dtype=dtype, device="meta")

    with pytest.MonkeyPatch.context() as patch, _Operators(seen):
        for module in [importlib.import_module(name) for name in KERNELS]:  # all before the first is patched
            for name, value in vars(module).items():
                if isinstance(value, KernelInterface):
                    patch.setattr(module, name, Kernel(name, seen))
        patch.setattr(fp8_block, "fp8_product", product)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))  # meta has no grouped product of codes
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            patch.setattr(torch.distributed, name, Kernel(name, seen)[None])
        yield seen
