"""A decode burst never waits for the device: no tensor is read, tested or measured by the host in it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.inference.batch_state import OutputProcessor
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from tests.support.generation import generate, request, rollout_engine

READING_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
READING_OPERATORS = {
    "_local_scalar_dense",  # every way to one number
    "nonzero",  # a size that only the device knows, like the rest
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_consecutive",
    "_unique2",
}


class _Reads(TorchDispatchMode):
    """Writes down what makes the host wait: operators by dispatch, and methods a CPU tensor answers directly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        size_unknown = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in READING_OPERATORS or by_mask or size_unknown:
            self.seen.append(name)
        return function(*args, **kwargs)


@contextlib.contextmanager
def recorded_reads(into: list[str]) -> Iterator[None]:
    """Append the name of every read within the block to ``into``."""
    with pytest.MonkeyPatch.context() as patch, _Reads() as reads:
        for name in READING_METHODS:
            original = getattr(torch.Tensor, name)

            def noted(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
                into.append(_name)
                return _original(self, *args, **kw)

            patch.setattr(torch.Tensor, name, noted)
        yield
        into.extend(reads.seen)


def watch(owner: object, method: str, into: list[str], patch: pytest.MonkeyPatch | None = None) -> list[int]:
    """Record the reads of every call of ``method``, run to its end; returns a list that grows by one a call."""
    original = getattr(owner, method)
    calls: list[int] = []

    def watched(*args: object) -> Any:
        calls.append(len(into))
        with recorded_reads(into):
            result = original(*args)
            return iter(list(result)) if inspect.isgenerator(result) else result

    setattr(owner, method, watched) if patch is None else patch.setattr(owner, method, watched)
    return calls


SAMPLINGS = {
    "plain": [{}],
    "greedy": [{"greedy": True}],
    "filtered": [{"top_k": 5, "top_p": 0.9, "temperature": 0.7}],
    "mixed": [{"greedy": True}, {"top_p": 0.9}, {"temperature": 1.3}],
    "stop strings": [{"stop": ("ab",)}],
}


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_no_read_in_a_decode_burst(policy: PolicyModel, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = itertools.cycle(SAMPLINGS[kind])
    wanted = [request((4, 9, 17 - i), 3, i, max_new_tokens=20 + i, **next(settings)) for i in range(5)]
    engine = rollout_engine(policy, max_batch_size=6, decode_steps_per_sync=4)
    in_bursts: list[str] = []
    in_collecting: list[str] = []
    bursts = watch(engine.runner, "decode", in_bursts)
    outputs = watch(OutputProcessor, "finish", in_collecting, monkeypatch)
    generate(policy, engine, wanted)

    assert len(bursts) > 5
    assert in_bursts == []
    # The recorder works: the reads that have to be are seen, and are few.
    assert "tolist" in in_collecting
    assert len(in_collecting) <= 3 * len(outputs)


def test_only_what_is_shown_is_read_before_its_end(policy: PolicyModel) -> None:
    wanted = [request((4, 9, 17 - i), 2, i, max_new_tokens=20 + i) for i in range(3)]
    engine = rollout_engine(policy, max_batch_size=6, decode_steps_per_sync=2)
    reads: list[str] = []
    shown: list[tuple[int, ...]] = []
    with rollout_mode(policy):
        engine.begin(1, 0)
        for each in wanted:
            engine.submit(each)
        finished = {}
        while engine.has_unfinished:
            finished |= {done.index: completions for done, completions in engine.step()}
            with recorded_reads(reads):
                assert engine.unfinished_tokens(lambda _: False) == []
            for asked, ids in engine.unfinished_tokens(lambda asked: asked.index == 1):
                assert asked is wanted[1]
                shown.append(ids)
    assert reads == []
    lengths = [len(ids) for ids in shown]
    assert len(lengths) > 5
    assert lengths == sorted(lengths)
    assert all(finished[1][0].token_ids[: len(ids)] == ids for ids in shown)


VALUES = torch.tensor([1.0, 0.0, 3.0])
READS = {
    "condition": lambda: bool(VALUES[0] > 0),
    "number": lambda: int(VALUES[0]),
    "list": lambda: VALUES.tolist(),
    "host copy": lambda: VALUES.cpu(),
    "mask": lambda: VALUES[VALUES > 0],
    "nonzero": lambda: torch.nonzero(VALUES),
    "repeats": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
    "index": lambda: range(3)[torch.tensor(1)],
}


@pytest.mark.parametrize("kind", READS)
def test_the_recorder_sees_every_kind_of_read(kind: str) -> None:
    seen: list[str] = []
    with recorded_reads(seen):
        READS[kind]()
    assert seen


def test_the_recorder_is_silent_about_device_work() -> None:
    seen: list[str] = []
    with recorded_reads(seen):
        VALUES.masked_fill(VALUES > 0, 1.0).gather(0, torch.tensor([0, 2])).cumsum(0).argmax()
    assert seen == []
