"""The few CUDA calls behind the graphs, in their order, with stand-ins: what they do is tested on a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_rl.inference.graphs import CudaRecorder


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


class _Generator:
    """Of torch 2.11: a state knows whether a capture draws from it, and a clone of it does not."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.is_captured = False

    def clone_state(self) -> _Generator:
        return _Generator(self.offset)

    def graphsafe_set_state(self, state: _Generator) -> _Generator:
        vars(self).update(vars(state))
        return self


class _Cuda:
    """``torch.cuda`` as far as the recorder goes; ``current`` is the stream that work would run on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = _Stream("main")
        self.captures: list[dict[str, Any]] = []
        self.handles = iter([(0, 1), (0, 2), (0, 3)])
        self.allocating: list[tuple[int, int]] = []
        """Pools of captures under way; in torch ``empty_cache`` fails unless there is none."""
        self.users: Counter[tuple[int, int]] = Counter()
        self.pinned: set[tuple[int, int]] = set()
        """Pools that torch 2.11 goes on recording pinned memory to, after a refused capture."""
        self.generators = [_Generator(offset=7)]
        for name, value in (
            ("Stream", _Stream), ("CUDAGraph", _Graph), ("stream", self.stream), ("graph", self.graph),
            ("current_stream", lambda: self.current), ("graph_pool_handle", lambda: next(self.handles)),
            ("current_device", lambda: 0), ("default_generators", self.generators),
        ):  # fmt: skip
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocating, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: _Graph, **settings: Any) -> Iterator[None]:
        """As torch's: a capture that CUDA refuses leaves neither the stream, nor the pool, nor the generator."""
        if settings["pool"] in self.pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.captures.append(settings)
        self.generators[0].is_captured = True
        graph.own_pool = pool = settings["pool"]
        self.current = settings["stream"]
        self.allocating.append(pool)
        self.users[pool] += 1
        try:
            yield
        except RuntimeError:
            self.pinned.add(pool)
            raise
        except Exception:  # the capture itself was sound
            self.end_allocating(0, pool)
            self.release(0, pool)
            self.generators[0].is_captured = False
            raise
        self.end_allocating(0, pool)
        self.current = self.main
        self.generators[0].is_captured = False

    def end_allocating(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.allocating:
            raise RuntimeError(f"device {device} does not allocate to pool {pool}")
        self.allocating.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert device == 0
        self.users[pool] -= 1


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
    assert [capture["pool"] for capture in cuda.captures] == [(0, 1)] * 3
    assert {capture["capture_error_mode"] for capture in cuda.captures} == {"thread_local"}
    replays[1]()
    assert [replay.__self__.replays for replay in replays] == [0, 1, 0]
    del replays
    gc.collect()
    recorder.record(lambda: None)
    assert cuda.captures[-1]["pool"] == (0, 2), "the pool went with its graphs"


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing"), TypeError("ours")])
def test_a_capture_that_fails_leaves_stream_pool_and_generator(cuda: _Cuda, error: Exception) -> None:
    recorder = CudaRecorder(torch.device("cuda", 0))
    kept = recorder.record(lambda: None)

    def refused() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        recorder.record(refused)
    assert cuda.current is cuda.main
    assert not cuda.allocating
    assert vars(cuda.generators[0]) == {"offset": 7, "is_captured": False}
    assert cuda.users[0, 1] == 1, "the graph that was captured before"
    recorder.record(lambda: None)
    assert cuda.captures[-1]["pool"] == (0, 2), "not the refused one's, though a graph of it lives"
    del kept
    gc.collect()
    recorder.record(lambda: None)
    assert cuda.captures[-1]["pool"] == (0, 3)
