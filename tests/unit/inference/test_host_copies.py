"""What the host gives the device between two bursts, and what it reads: neither waits for the steps in between.

Copies are watched on the meta device, where nothing has values; the reads of CUDA, with stand-ins for its streams.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.inference.batch_state import BatchState, OutputProcessor
from megatron_rl.inference.sampler import SamplingModes
from megatron_rl.inference.scheduler import Chunk
from megatron_rl.inference.sequence import Sequence, SequenceGroup, SequenceStatus
from megatron_rl.models.delta_rule import Chunks
from megatron_rl.platform.device import to_device
from tests.support.generation import letters, request
from tests.support.meta import META, meta_runner
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy


class _Factories(TorchFunctionMode):
    """Notes tensors made of host data right on the device."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        made = getattr(function, "__name__", "") in ("tensor", "as_tensor")  # `platform.cpu` stands before torch.tensor
        if made and device is not None and torch.device(device).type != "cpu":
            self._seen.append("factory")
        return function(*args, **(kwargs or {}))


class _Copies(TorchDispatchMode):
    """Notes operators that bring values of the host to the device, and do so while it waits; ``copies`` counts all."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.copies = 0
        self._factories = _Factories(self.seen)

    def __enter__(self) -> _Copies:
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._factories.__exit__(*args)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        lists = [one for one in given if one.device.type == "cpu" and one.dim()]
        on_device = isinstance(result, torch.Tensor) and result.device == META
        if lists and (on_device or any(one.device == META for one in given)):
            name = function.overloadpacket.__name__
            self.copies += 1
            if not kwargs.get("non_blocking", "non_blocking" in name):
                self.seen.append(name)
        return result


def chunks() -> list[Chunk]:
    """A prompt of two samples, a later turn that goes on from it, and the first piece of a long prompt."""
    pair = SequenceGroup(0, request((4, 9, 17, 2, 5), 2, max_new_tokens=9), [11, 12]).sequences
    (turn,) = SequenceGroup(1, request((4, 9, 17, 2, 6, 8), 1, 1, max_new_tokens=9), [13]).sequences
    (long,) = SequenceGroup(2, request((4,) * 9, 1, 2, max_new_tokens=9), [14]).sequences
    for row, sequence in enumerate((*pair, turn, long)):
        sequence.row = row
    return [
        Chunk(tuple(pair), pair[0].prefill_ids, 0, 5, after=((0, 1, 5),)),
        Chunk((turn,), turn.prefill_ids, 4, 6, before=((0, 2, 4),)),
        Chunk((long,), long.prefill_ids, 0, 4),
    ]


@pytest.mark.parametrize("backend", ["sdpa", "paged"])
@torch.inference_mode()
def test_the_host_waits_for_no_copy_between_two_bursts(one_rank: object, backend: str) -> None:
    runner = meta_runner(tiny_policy(tiny_config()), backend)
    with _Copies() as copies:
        list(runner.prefill(chunks(), SamplingModes()))
        list(runner.decode(6, 48, 2, SamplingModes()))
        runner.state.mark_idle([1, 3])
        runner.move([(4, 1), (5, 3)], ((4, 1, 8), (5, 3, 8)))
        if backend == "paged":
            runner.context.cache.set_block_table(array("i", [0]) * runner.context.cache.table.numel())
        of_batches = copies.copies
        Chunks.of([5, 3], 3, META)
    assert copies.seen == []
    assert of_batches == (24 if backend == "paged" else 23)
    assert copies.copies == of_batches + 8


WAITING: dict[str, Callable[[], object]] = {
    "factory": lambda: torch.tensor([1, 2], device=META),
    "copy": lambda: torch.ones(3).to(META),
    "into": lambda: torch.zeros(3, device=META).copy_(torch.ones(3)),
    "rows": lambda: torch.zeros(3, 2, device=META)[torch.tensor([1, 2])],
}


@pytest.mark.parametrize("kind", WAITING)
@torch.inference_mode()
def test_the_recorder_sees_what_waits(kind: str) -> None:
    with _Copies() as copies:
        WAITING[kind]()
    assert copies.seen


@torch.inference_mode()
def test_the_recorder_is_silent_about_what_does_not() -> None:
    with _Copies() as copies:
        to_device([1, 2], META)
    assert (copies.seen, copies.copies) == ([], 1)


# -- CUDA, as far as reads go ------------------------------------------------------------------------


class _Stream:
    """Of ``torch.cuda``; ``moments`` are those it waited for."""

    def __init__(self, *_: object, priority: int = 0) -> None:
        self.priority = priority
        self.moments: list[tuple[_Stream, int]] = []

    def record_event(self) -> tuple[_Stream, int]:
        return self, len(self.moments)

    def wait_event(self, ready: tuple[_Stream, int]) -> None:
        self.moments.append(ready)


class _Cuda:
    """``torch.cuda`` and copies to it: notes on which stream the host reads, and what is copied how."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = _Stream()
        self.reads: list[_Stream] = []
        self.copies: list[tuple[str, bool]] = []
        self.pinned: list[torch.Tensor] = []
        tolist = torch.Tensor.tolist

        def read(values: torch.Tensor) -> object:
            self.reads.append(self.current)
            return tolist(values)

        def pin(values: torch.Tensor) -> torch.Tensor:
            self.pinned.append(values.clone())
            return self.pinned[-1]

        def to(values: torch.Tensor, where: object, non_blocking: bool = False) -> torch.Tensor:
            if isinstance(where, torch.dtype):
                return values.type(where)
            self.copies.append(("pinned" if any(values is one for one in self.pinned) else "pageable", non_blocking))
            return values

        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.Tensor, "tolist", read)
        patch.setattr(torch.Tensor, "pin_memory", pin)
        patch.setattr(torch.Tensor, "to", to)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@torch.inference_mode()
def test_cuda_reads_on_a_stream_of_its_own_behind_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    state = BatchState(3, 6, torch.zeros(VOCABULARY, dtype=torch.bool))
    sequences: list[Sequence] = []
    for row, sequence in enumerate(SequenceGroup(0, request((4, 9), 3, max_new_tokens=6), [1, 2, 3]).sequences):
        sequence.row, sequence.status = row, SequenceStatus.RUNNING
        sequences.append(sequence)
    state.alive[0], state.alive[2] = True, True
    state.count.copy_(torch.tensor([2, 2, 2]))
    state.tokens[1, :2] = torch.tensor([7, 8])
    cuda = _Cuda(monkeypatch)
    state.device = torch.device("cuda")
    outputs = OutputProcessor(state, (), letters)
    look = outputs.snapshot_flags(sequences)
    state.alive[2] = False  # in a step that was enqueued behind it
    assert cuda.reads == []
    finished = outputs.finish(sequences, look)
    assert [(one.row, one.output_ids) for one in finished] == [(1, (7, 8))]
    (own,) = set(cuda.reads)
    assert len(cuda.reads) == 3
    assert own is not cuda.main is cuda.current
    assert own.moments == [(cuda.main, 0)]
    assert own.priority < cuda.main.priority
    assert set(cuda.copies) == {("pinned", True)}
