"""Decode steps as CUDA graphs: recorded once for each batch size, replayed ever after.

    rows 5 ─► size 8 ─┐
                      ├─► (linears in use, reach, kinds) ─► recorded? ─► replay
    keys 300 ► 512 ───┘                                       │ no: record all sizes, the largest first

Weights, quantised copies and the cache change in place, so the graphs outlive optimizer steps and refreshes.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Protocol

import torch

from megatron_rl.attention.product import FEWEST_ROWS
from megatron_rl.inference.decode import DecodeBurst, SamplingKinds
from megatron_rl.inference.graph_sources import StepSources, Variant
from megatron_rl.inference.kv_cache import Cache
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.models import PolicyModel

logger = logging.getLogger(__name__)

Work = Callable[[], None]
"""Device work on static buffers: the same kernels on the same addresses, however often it is called."""

_STEP = 8
"""Sizes between powers of two are multiples of it, but for the last."""
_SHORTEST_REACH = 256


class Decode(Protocol):
    """See `DecodeBurst.__call__`."""

    def __call__(self, rows: int, key_length: int, steps: int, kinds: SamplingKinds) -> None: ...


class Recorder(Protocol):
    """Records device work and repeats it. Injected: tests on a CPU bring their own."""

    def warm_up(self, work: Work) -> None:
        """Run ``work`` as it will be recorded, so that kernels compile and libraries start."""
        ...

    def record(self, work: Work) -> Work:
        """Without running it; the result repeats it on the same memory."""
        ...

    def used_bytes(self) -> int:
        """Device memory in use by this process."""
        ...


def graph_sizes(slots: int, most: int) -> tuple[int, ...]:
    """At most ``most`` batch sizes up to ``slots``: powers of two, then the widest gaps between them are halved.

    The engine never decodes fewer than `FEWEST_ROWS` rows. Where not all powers fit, the small ones are left out: a
    step of few rows reads the weights, whether it computes 4 rows or 32.
    """
    powers = [2**exponent for exponent in range(FEWEST_ROWS.bit_length() - 1, slots.bit_length())]
    smaller = [size for size in powers if size < slots]
    sizes = [*smaller[max(0, len(smaller) - most + 1) :], slots]
    while len(sizes) < most:
        gaps = [(after - before, before) for before, after in pairwise(sizes)]
        gap, before = max(gaps, default=(0, 0), key=itemgetter(0))
        if gap < 2 * _STEP:
            break
        bisect.insort(sizes, before + gap // 2 // _STEP * _STEP)
    return tuple(sizes)


def graph_reaches(max_length: int) -> tuple[int, ...]:
    """Key lengths to record for: doubling from 256 up to ``max_length``."""
    reaches = []
    reach = _SHORTEST_REACH
    while reach < max_length:
        reaches.append(reach)
        reach *= 2
    return (*reaches, max_length)


@dataclass
class _Recorded:
    """The graphs of one variant, and where the buffers lay that they read."""

    generation: int
    addresses: tuple[int, ...]
    replays: dict[tuple[int, SamplingKinds], dict[int, Work]] = field(default_factory=dict)
    """(reach, kinds) -> batch size -> replay."""


class GraphedDecode:
    """A `DecodeBurst` step by step, replayed where it can be, with the rows rounded up to a size that was recorded.

    Rows beyond the running ones are not alive: their steps write to the trash column.
    """

    def __init__(
        self,
        burst: Decode,
        state: SlotState,
        sources: StepSources,
        recorder: Recorder,
        sizes: Sequence[int],
        reaches: Sequence[int],
    ) -> None:
        """``sizes`` and ``reaches`` ascend."""
        self._burst = burst
        self._state = state
        self._sources = sources
        self._recorder = recorder
        self._sizes = tuple(sizes)
        self._reaches = tuple(reaches)
        self._recorded: dict[Variant, _Recorded] = {}
        self._said: set[str] = set()
        self._off = False

    def __call__(self, rows: int, key_length: int, steps: int, kinds: SamplingKinds) -> None:
        """See `DecodeBurst.__call__`."""
        for step in range(steps):
            reach = min(key_length + step, self._sources.longest)
            replay = None if self._off or not self._covered(rows, reach) else self._replay(rows, reach, kinds)
            if replay is None:
                self._burst(rows, reach, 1, kinds)
            else:
                replay()

    def forget(self) -> None:
        """Drop all graphs and the memory they hold: the KV cache goes, and comes back at other addresses."""
        self._recorded = {}

    def _covered(self, rows: int, key_length: int) -> bool:
        why = None
        if self._sources.observed:
            why = "while the linear layers are observed (calibration, or the audit of the first quantised rollout)"
        elif rows > self._sizes[-1]:
            why = f"for batches above {self._sizes[-1]} rows, the largest size recorded"
        elif key_length > self._reaches[-1]:
            why = f"beyond {self._reaches[-1]} keys, the longest reach recorded"
        if why is not None and why not in self._said:
            self._said.add(why)
            logger.info("decode runs eager %s", why)
        return why is None

    def _replay(self, rows: int, key_length: int, kinds: SamplingKinds) -> Work | None:
        """None when the capture failed."""
        recorded = self._current()
        reach = self._reaches[bisect.bisect_left(self._reaches, key_length)]
        family = recorded.replays.get((reach, kinds))
        if family is None:
            family = self._record_all(reach, kinds)
            if family is None:
                return None
            recorded.replays[reach, kinds] = family
        return family[self._sizes[bisect.bisect_left(self._sizes, rows)]]

    def _current(self) -> _Recorded:
        """The graphs for the linears in use now; those that read what is no longer there are dropped."""
        variant, generation, addresses = self._sources.variant, self._sources.generation, self._sources.addresses
        known = self._recorded.get(variant)
        if known is not None and (known.generation, known.addresses) == (generation, addresses):
            return known
        if known is not None and known.generation == generation:
            logger.warning("decode graphs are captured anew: weights or the KV cache have moved in memory")
        self._recorded = {
            other: graphs
            for other, graphs in self._recorded.items()
            if other != variant and graphs.generation == generation and _alive(other)
        }
        self._recorded[variant] = fresh = _Recorded(generation, addresses)
        return fresh

    def _record_all(self, reach: int, kinds: SamplingKinds) -> dict[int, Work] | None:
        """Every size, the largest first: the smaller ones then fit into its memory."""
        started, before = time.perf_counter(), self._recorder.used_bytes()
        replays = {}
        with _untouched(self._state):
            for size in reversed(self._sizes):
                work = partial(self._burst, size, reach, 1, kinds)
                self._recorder.warm_up(work)
                try:
                    replays[size] = self._recorder.record(work)
                except RuntimeError as error:  # what torch raises for all that CUDA does not like in a capture
                    self._off = True
                    self._recorded.clear()
                    logger.warning("decode runs eager from here on: no CUDA graph could be captured (%s)", error)
                    return None
        logger.info(
            "decode graphs: %d batch sizes up to %d, captured in %.1f s, %.1f MiB (up to %d keys)",
            len(replays), self._sizes[-1], time.perf_counter() - started,
            max(0, self._recorder.used_bytes() - before) / 2**20, reach,
        )  # fmt: skip
        return replays


def with_graphs(
    burst: DecodeBurst, state: SlotState, policy: PolicyModel, cache: Cache, most: int | None
) -> Decode:
    """``burst`` behind graphs of at most ``most`` batch sizes; as it is where ``most`` is None or they cannot be."""
    if most is None:
        return burst
    problem = None
    if policy.device.type != "cuda":
        problem = f"it needs a CUDA device, and this run is on {policy.device.type}"
    elif policy.config.num_moe_experts is not None:
        problem = "megatron-core's experts read on the host how many tokens each of them gets"
    if problem is not None:
        logger.info("--enable-cuda-graph has no effect: %s", problem)
        return burst
    from megatron_rl.inference.cuda_recorder import CudaRecorder

    longest = cache.shape.max_length
    return GraphedDecode(
        burst,
        state,
        StepSources(policy.gpt, cache),
        CudaRecorder(policy.device),
        graph_sizes(state.alive.shape[0], most),
        graph_reaches(longest) if policy.attention.cache.needs_key_length else (longest,),
    )


@contextlib.contextmanager
def _untouched(state: SlotState) -> Iterator[None]:
    """Inside, all rows count as finished, and afterwards everything is as it was.

    A step then only writes a row's next key and value where the row itself will write the same ones.
    """
    buffers = [held for held in vars(state).values() if isinstance(held, torch.Tensor)]
    kept = [buffer.clone() for buffer in buffers]
    state.alive.zero_()
    try:
        yield
    finally:
        for buffer, was in zip(buffers, kept, strict=True):
            buffer.copy_(was)


def _alive(variant: Variant) -> bool:
    return all(reference is None or reference() is not None for reference in variant)
