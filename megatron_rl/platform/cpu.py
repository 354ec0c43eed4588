"""Patches that run megatron-core without CUDA.

megatron-core uses ``device="cuda"``, ``torch.cuda.current_device()`` and CUDA random numbers in code that needs no GPU.
`install` redirects them to the CPU before megatron is imported.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Adam, Optimizer
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange", "zeros_like")


def install() -> None:
    """Apply every patch. Call once, before the first megatron import."""
    _patch_device_queries()
    _patch_streams_and_events()
    _patch_random_numbers()
    _patch_tensor_factories()
    _patch_tensor_methods()
    _gather_dtypes_apart()
    _keep_optimizers_from_the_compiler()
    _import_megatron_without_compilation()
    _patch_megatron()


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


class _Event:
    """``torch.cuda.Event`` with the host clock (timing of engine and p2p)."""

    _time = 0.0
    __init__ = synchronize = wait = _do_nothing

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other._time - self._time) * 1e3

    def query(self) -> bool:
        return True


class _Stream:
    """``torch.cuda.Stream`` for the CPU, where everything runs in order."""

    __init__ = wait_stream = wait_event = synchronize = __exit__ = _do_nothing

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self


def _patch_device_queries() -> None:
    """Buffers, optimizers and schedules ask for the current device."""
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = _do_nothing
    torch.cuda.memory_stats = lambda *_, **__: defaultdict(int)
    torch.cuda.nvtx.range_push = _do_nothing
    torch.cuda.nvtx.range_pop = _do_nothing


def _patch_streams_and_events() -> None:
    """Used by context-parallel rope, the MoE all-to-all and p2p communication."""
    stream = _Stream()
    torch.cuda.Event = _Event
    torch.cuda.Stream = _Stream
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.default_stream = lambda *_, **__: stream


def _patch_random_numbers() -> None:
    """Replace the CUDA generator by the CPU generator."""
    torch.cuda.manual_seed = torch.manual_seed
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_tensor_factories() -> None:
    """Redirect ``device="cuda"`` in optimizers, gradient clipping and schedules."""
    _device_constructors()  # torch caches its own here; ``with torch.device("meta")`` would not know the others
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def redirected(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return functools.update_wrapper(redirected, factory, updated=())


def _patch_tensor_methods() -> None:
    """Optimizers and ``clip_grads`` recognise tensors by the type name ``torch.cuda.*``."""
    original_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original_type(self, *args, **kwargs)
        if args or kwargs or answer.startswith("torch.cuda."):
            return answer
        return "torch.cuda." + answer.removeprefix("torch.")

    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.record_stream = _do_nothing


def _gather_dtypes_apart() -> None:
    """Gather mixed dtypes as bytes: gloo concatenates megatron's coalesced gathers, mixing up bf16 and fp8."""
    names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")  # of torch 2.13, and before
    name = next(name for name in names if hasattr(dist.ProcessGroup, name))
    gather = getattr(dist.ProcessGroup, name)

    def gathered(group: dist.ProcessGroup, wholes: Sequence[Any], parts: Sequence[Any], *args: Any) -> dist.Work:
        if len({part.dtype for part in parts}) > 1:
            wholes, parts = ([tensor.view(torch.uint8) for tensor in tensors] for tensors in (wholes, parts))
        return gather(group, wholes, parts, *args)

    setattr(dist.ProcessGroup, name, gathered)


def _keep_optimizers_from_the_compiler() -> None:
    """Remove torch decorators, if any, that import ``torch._dynamo``, which takes a second."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        if hasattr(method := vars(Optimizer)[name], "__wrapped__"):
            setattr(Optimizer, name, method.__wrapped__)
    for kind in (Adam, SGD):  # AdamW has Adam's
        if hasattr(kind.step, "__wrapped__"):
            kind.step = torch.no_grad()(kind.step.__wrapped__)


def _import_megatron_without_compilation() -> None:
    """Import megatron with ``torch.compile`` as identity: compiling tiny fused functions costs seconds at start-up."""
    original = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    try:
        import megatron.core
        import megatron.core.jit
    finally:
        torch.compile = original
    megatron.core.jit.disable_jit_fuser()


def _patch_megatron() -> None:
    import megatron.core.inference.communication_utils as inference_communication
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    # Otherwise the state is queued for a CUDA initialisation that never comes (a leak).
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Pipeline inference refuses CPU tensors.
    inference_communication._is_cuda = _do_nothing
    token_dispatcher.maybe_move_tensor_to_cpu = lambda sizes, as_numpy=False, record_stream=False: (
        sizes.numpy() if as_numpy and torch.is_tensor(sizes) else sizes  # MoE split sizes are already on the host
    )
    mappings._gather_along_first_dim = _gather_uneven(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_uneven(mappings._reduce_scatter_along_first_dim)


def _gather_uneven(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gather unequal parts, which gloo does not support, for split experts (--expert-tensor-parallel-size)."""

    def gathered(
        part: torch.Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, *args: Any, **named: Any
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return even(part, group, sizes, *args, **named)
        whole = part.new_empty([sum(sizes), *part.shape[1:]])
        copies = part.repeat(group.size(), *[1] * (part.dim() - 1))
        dist.all_to_all_single(whole, copies, list(sizes), [len(part)] * group.size(), group=group)
        return whole

    return functools.update_wrapper(gathered, even)


def _reduce_scatter_uneven(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Reduce-scatter unequal parts: each rank gets the sum of its part."""

    def scattered(
        whole: torch.Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, *args: Any, **named: Any
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return even(whole, group, sizes, *args, **named)
        own = sizes[group.rank()]
        parts = whole.new_empty([group.size() * own, *whole.shape[1:]])
        dist.all_to_all_single(parts, whole.contiguous(), [own] * group.size(), list(sizes), group=group)
        return parts.view(group.size(), own, *whole.shape[1:]).sum(0)

    return functools.update_wrapper(scattered, even)
