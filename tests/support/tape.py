"""A stand-in for CUDA graphs on a CPU: a tape of the operators of one run, repeated without the Python around them.

Like a graph it knows addresses only. Whatever Python computed during the recording is frozen: a length, a branch,
a tensor that was new. And it refuses what a capture refuses: results that the host reads, sizes that depend on
data, tensors made of host data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.inference import graphs
from megatron_rl.inference.graphs import DecodeGraphs, Work, graph_sizes
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.types import Request
from tests.support.generation import ragged_requests

REFUSED = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_consecutive",
    "lift_fresh", "lift_fresh_copy",
}  # fmt: skip
"""What CUDA cannot capture: reads by the host, and copies of host data."""


@dataclass(frozen=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]
    """Those with memory of their own; the others are views of what is here already."""

    def repeat(self) -> None:
        is_collective = self.function.namespace == "c10d"  # whose schemas do not say that they write
        if not self.outputs and not self.function._schema.is_mutable and not is_collective:
            return  # a view: it goes on pointing where it pointed
        result = self.function(*self.args, **self.kwargs)
        for leaf in _leaves(result):
            if isinstance(leaf, torch.ScriptObject):  # of a collective: the rest of the tape comes after it
                leaf.wait()
        results = _tensors(result)
        own = [result for result in results if result.numel()][-len(self.outputs) :] if self.outputs else []
        for output, result in zip(self.outputs, own, strict=True):
            output.copy_(result)


class _NoLists(TorchFunctionMode):
    """Refuses ``tolist``, which is no operator: of a CPU's tensor a dispatch mode does not see it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.tolist:
            raise RuntimeError("operation not permitted when stream is capturing: tolist")
        return function(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records inside ``with``; what the block writes into memory that was there before is undone at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._made: dict[int, torch.Tensor] = {}
        self._outside: dict[int, tuple[torch.Tensor, int]] = {}
        self._numbers: dict[int, torch.Tensor] = {}
        """Python's, as tensors."""
        self._fresh: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._no_lists = _NoLists()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it takes longer than an operator."""
        return False

    def __enter__(self) -> Tape:
        self._no_lists.__enter__()
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        inputs = _tensors((args, kwargs))
        numbers = [tensor for tensor in inputs if id(tensor) in self._numbers]
        # x[mask] = 0, as megatron's embedding has it over tensor-parallel ranks, is torch's masked_fill_ on CUDA.
        fills = name == "index_put_" and by_mask and any(tensor is args[2] for tensor in numbers)
        is_number = name == "lift_fresh" and args[0].dim() == 0
        if not fills and not is_number and (name in REFUSED or by_mask or numbers):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for tensor in inputs:
            if id(tensor) not in self._made:
                self._outside[id(tensor)] = tensor, tensor.data_ptr()
        if function._schema.is_mutable:
            self._keep(function, args, kwargs)
        result = function(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        results = _tensors(result)
        if is_number:
            self._numbers.update({id(one): one for one in results})
        own = tuple(r for r in results if r.numel() and r.untyped_storage().data_ptr() not in known)
        assert not own or own == tuple(r for r in results if r.numel())[-len(own) :], f"{name}: views after results"
        self._made.update({id(tensor): tensor for tensor in results if not any(tensor is one for one in inputs)})
        self._fresh.update(tensor.untyped_storage().data_ptr() for tensor in own)
        self._calls.append(_Call(function, args, kwargs, own))
        return result

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._no_lists.__exit__(*args)
        for storage, before in self._before.values():
            storage.copy_(before)

    def replay(self) -> None:
        """Once more, on the same memory."""
        for tensor, address in self._outside.values():
            assert tensor.data_ptr() == address, f"a buffer of shape {list(tensor.shape)} has moved since the capture"
        for call in self._calls:
            call.repeat()

    def _keep(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position, argument in enumerate(function._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or value is None:
                continue
            for tensor in _tensors(value):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._fresh:
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))


class EagerRecorder:
    """In the place of `CudaRecorder`: records nothing, so its steps are eager ones of the sizes that graphs have."""

    def warm_up(self, work: Work) -> None:
        work()

    def record(self, work: Work) -> Work:
        return work

    def used_bytes(self) -> int:
        return 0


class TapeRecorder:
    """In the place of `CudaRecorder`, on any device; ``warmed``, ``recorded`` and ``replayed`` count."""

    def __init__(self) -> None:
        self.warmed = 0
        self.recorded = 0
        self.replayed = 0

    @staticmethod
    def problem(device: torch.device) -> str | None:
        return None

    def warm_up(self, work: Work) -> None:
        self.warmed += 1
        work()

    def record(self, work: Work) -> Work:
        tape = Tape()
        with tape:
            work()
        self.recorded += 1
        return self._counted(tape.replay)

    def used_bytes(self) -> int:
        return self.recorded << 20

    def _counted(self, replay: Callable[[], None]) -> Work:
        def counted() -> None:
            self.replayed += 1
            replay()

        return counted


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _leaves(value: Any) -> list[Any]:
    """As torch's `tree_leaves`, which takes ten times as long for the arguments of an operator."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for part in value for leaf in (_leaves(part) if isinstance(part, (tuple, list, dict)) else (part,))]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[TapeRecorder]:
    """Engines have graphs, as on a CUDA device; the result grows by the recorder of each."""
    made: list[TapeRecorder] = []

    class Recorder(TapeRecorder):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(graphs, "CudaRecorder", Recorder)
    return made


def taped(
    engine: RolloutEngine, policy: PolicyModel, sizes: Sequence[int] = (), key_lengths: Sequence[int] = (24, 48)
) -> TapeRecorder:
    """Put a tape in front of the engine's decode step, of ``sizes`` or those that a GPU would have."""
    recorder = TapeRecorder()
    sizes = sizes or graph_sizes(engine.max_batch_size, max_sizes=16)
    engine.runner.graphs = DecodeGraphs(engine.runner, policy, recorder, sizes, key_lengths)
    return recorder


def requests_of_a_step() -> list[Request]:
    return ragged_requests(5, num_samples=2, max_new_tokens=12)
