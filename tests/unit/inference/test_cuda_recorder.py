"""The few CUDA calls behind the graphs, in their order, with stand-ins: what they do is tested on a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_rl.inference.cuda_recorder import CudaRecorder


class _Stream:
    def __init__(self, name: object) -> None:
        self.name = name
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)


class _Graph:
    def __init__(self) -> None:
        self.own_pool = object()
        self.replays = 0

    def pool(self) -> object:
        return self.own_pool

    def replay(self) -> None:
        self.replays += 1


class _Cuda:
    """``torch.cuda`` as far as the recorder goes; ``current`` is the stream that work would run on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = _Stream("main")
        self.captures: list[dict[str, Any]] = []
        for name, value in (
            ("Stream", _Stream), ("CUDAGraph", _Graph), ("stream", self.stream), ("graph", self.graph),
            ("current_stream", lambda: self.current),
        ):  # fmt: skip
            patch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: _Graph, **settings: Any) -> Iterator[None]:
        self.captures.append(settings)
        if settings["pool"] is not None:
            graph.own_pool = settings["pool"]
        self.current = settings["stream"]
        yield  # like torch, it does not go back when the block raises
        self.current = self.main


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    return _Cuda(monkeypatch)


def test_a_warm_up_runs_on_the_stream_of_the_captures_between_two_waits(cuda: _Cuda) -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    seen: list[_Stream] = []
    recorder.warm_up(lambda: seen.append(cuda.current))
    recorder.record(lambda: seen.append(cuda.current))
    warm, captured = seen
    assert warm is captured is cuda.captures[0]["stream"] is not cuda.main
    assert warm.waited_for == [cuda.main]
    assert cuda.main.waited_for == [warm]
    assert cuda.current is cuda.main


def test_graphs_share_a_pool_while_one_of_them_lives(cuda: _Cuda) -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    replays = [recorder.record(lambda: None) for _ in range(3)]
    first, second, third = (capture["pool"] for capture in cuda.captures)
    assert first is None
    assert second is third is replays[0].__self__.own_pool
    assert {capture["capture_error_mode"] for capture in cuda.captures} == {"thread_local"}
    replays[1]()
    assert [replay.__self__.replays for replay in replays] == [0, 1, 0]
    del replays
    gc.collect()
    recorder.record(lambda: None)
    assert cuda.captures[-1]["pool"] is None, "the pool went with its graphs"


def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda: _Cuda) -> None:
    recorder = CudaRecorder(torch.device("cuda"))

    def refused() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(refused)
    assert cuda.current is cuda.main
    recorder.record(lambda: None)
    assert cuda.captures[-1]["pool"] is None
