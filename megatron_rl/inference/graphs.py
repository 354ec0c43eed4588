"""Decode steps as CUDA graphs: recorded once for each batch size, replayed ever after.

    rows 5 ─► size 8 ─┐
                      ├─► (linears in use, keys, modes) ──► recorded? ─► replay, part by part
    keys 300 ► 512 ───┘                                       │ no: record all sizes, the largest first

A step is one graph; on a pipeline stage one for each of its chunks of layers, with messages in between. Weights,
quantised copies and the cache change in place, so the graphs outlive optimizer steps and refreshes.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from operator import itemgetter

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor

from megatron_rl.arithmetic import FEWEST_ROWS
from megatron_rl.errors import one_line
from megatron_rl.inference.engine import EngineOptions, GraphOptions
from megatron_rl.inference.model_runner import ModelRunner
from megatron_rl.inference.sampler import SamplingModes
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.collectives import any_rank, max_over
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.linears import parallel_linears

logger = logging.getLogger(__name__)

Work = Callable[[], None]
"""Device work on static buffers: every call runs the same kernels on the same addresses."""

_STEP = 8
"""Batch sizes between powers of two are multiples of it, except the largest."""
_SHORTEST_KEY_LENGTH = 256


class CudaRecorder:
    """Captures CUDA graphs, in one memory pool. Tests on a CPU inject their own recorder."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @staticmethod
    def problem(device: torch.device) -> str | None:
        """Say why nothing can be recorded on ``device``; None if it can."""
        return None if device.type == "cuda" else f"it needs a CUDA device, and this run is on {device.type}"

    def warm_up(self, work: Work) -> None:
        """Run ``work`` as it will be recorded, so that kernels compile and libraries get their workspaces."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Work) -> Work:
        """Record ``work`` without running it; the result repeats it on the same memory."""
        # A pool is freed with its last graph. After a failed capture torch 2.11 keeps allocating pinned memory in its
        # pool. In both cases the next capture needs a new pool.
        pool = next((graph.pool() for graph in self._graphs), None) or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer stream context restores the stream after a failed capture; torch's own does not. Thread-local:
            # NCCL's watchdog queries its events meanwhile, which would invalidate a global capture.
            with torch.cuda.stream(self._stream):
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
        except BaseException:
            self._end_capture(pool)
            self._graphs.clear()
            raise
        self._graphs.add(graph)
        return graph.replay

    def used_bytes(self) -> int:
        """Return the device memory in use by the driver's count, because graphs take memory beside torch's."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _end_capture(self, pool: tuple[int, int]) -> None:
        """Stop allocating in ``pool`` and drawing for a graph: a failed capture does not do it by itself.

        Otherwise every later ``torch.cuda.empty_cache()`` raises "captures_underway.empty() INTERNAL ASSERT FAILED",
        and the default generator, used by dropout, stays in capture mode.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())  # seed and offset as they are
        with contextlib.suppress(RuntimeError):  # a capture that ended before the error has stopped, and let go
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)


class DecodeGraphs:
    """Captured decode steps. Rows are rounded up to a captured batch size; the extra rows are not alive.

    A graph holds addresses of weights, quantised copies and the KV cache. A replay sees values changed in place, but
    not a new address or another code path, so both are compared before every replay, while the device runs the last
    one.
    """

    def __init__(
        self, runner: ModelRunner, policy: PolicyModel, recorder: CudaRecorder, sizes: Sequence[int],
        key_lengths: Sequence[int], after: int = 0,
    ) -> None:  # fmt: skip
        """``sizes`` and ``key_lengths`` ascend to the row count and the longest sequence; ``after``: `GraphOptions`."""
        self.parts = runner.parts
        self._state = runner.state
        self._cache = runner.context.cache
        self._recorder = recorder
        self._sizes = tuple(sizes)
        self._key_lengths = tuple(key_lengths)
        self._eager_steps = after
        model = torch.nn.ModuleList(policy.chunks)
        self._hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._linears = [vars(linear) for linear in dict.fromkeys(parallel_linears(model).values())]
        self._weights = (*model.parameters(), *model.buffers())
        self._codes = tuple(filter(is_float8tensor, self._weights))  # whose own addresses are 0
        self.recorded: dict[tuple, dict[int, list[Work]]] = {}
        """(`_variant`, `_addresses`, key length, modes) -> batch size -> one replay per part."""
        self._warm: set[tuple] = set()
        """(variant, key length, modes) captured before, so their kernels are compiled."""
        self._logged_hooks = self._off = False

    def is_due(self, steps: int) -> bool:
        """Return False until `GraphOptions.after` steps were counted; the same on all lockstep ranks."""
        if self._eager_steps <= 0:
            return True
        self._eager_steps -= steps
        return False

    def step(self, rows: int, key_length: int, modes: SamplingModes) -> list[Work]:
        """Return the parts of a decode step in order (see `ModelRunner.decode`); eager ones if no graph can be used.

        A capture waits for the device, so post pending receives first: otherwise two pipeline stages deadlock.
        """
        key_length = min(key_length, self._cache.max_length)
        replays = None if self._off or self._observed() else self._replays(rows, key_length, modes)
        return [partial(part, rows, key_length, modes) for part in self.parts] if replays is None else replays

    def forget(self) -> None:
        """Drop all graphs and their memory: the KV cache is about to move."""
        self.recorded = {}

    def _observed(self) -> bool:
        """True while a module has hooks, which a replay would skip."""
        observed = any(self._hooks)
        if observed and not self._logged_hooks:
            logger.info("decode runs eager while linear layers are observed: calibration, audit of a quantised rollout")
            self._logged_hooks = True
        return observed

    def _replays(self, rows: int, key_length: int, modes: SamplingModes) -> list[Work] | None:
        """Return the parts for the next larger batch size, captured if needed; None if the capture failed."""
        key_length = self._key_lengths[bisect.bisect_left(self._key_lengths, key_length)]
        key = self._variant(), self._addresses(), key_length, modes
        if key not in self.recorded:
            self._drop_stale(*key[:2])
            replays = self.record(key_length, modes)
            if replays is None:
                return None
            self.recorded[key] = replays
        return self.recorded[key][self._sizes[bisect.bisect_left(self._sizes, rows)]]

    def _variant(self) -> tuple[weakref.ref | None, ...]:
        """Identify the replaced ``forward`` of every linear layer, as weak references; None where it is the original.

        Reinstalled quantised copies give the same variant, another recipe a different one. Unlike addresses it is the
        same on all ranks.
        """
        forwards = [attributes.get("forward") for attributes in self._linears]
        return tuple([f if f is None else weakref.ref(getattr(f, "__self__", f)) for f in forwards])

    def _addresses(self) -> tuple[int, ...]:
        """Addresses of weights and cache. Those of quantised copies are not compared: new copies are a new variant."""
        codes = [weight.get_data_tensors()[0] for weight in self._codes]
        return tuple(map(torch.Tensor.data_ptr, (*self._weights, *codes, *self._cache.tensors)))

    def _drop_stale(self, variant: tuple[weakref.ref | None, ...], addresses: tuple[int, ...]) -> None:
        """Drop graphs whose tensors have moved or are gone."""
        moved = {key for key in self.recorded if key[0] == variant and key[1] != addresses}
        if moved:
            logger.warning("decode graphs are captured anew: weights or the KV cache have moved in memory")
        gone = {key for key in self.recorded if any(owner is not None and owner() is None for owner in key[0])}
        self.recorded = {key: replays for key, replays in self.recorded.items() if key not in moved | gone}

    def record(self, key_length: int, modes: SamplingModes) -> dict[int, list[Work]] | None:
        """Capture every size, largest first, so that the others fit into its memory. None if a capture failed.

        All rows count as ended meanwhile, and the batch is restored afterwards: a captured step writes only the next
        key and value of each row, which the row overwrites in its own step. Recaptures after the KV cache came back
        skip warm-up and measuring, because every training step may need one.
        """
        kind = self._variant(), key_length, modes
        is_warm = kind in self._warm
        started, before = time.perf_counter(), 0 if is_warm else self._recorder.used_bytes()
        kept = [buffer.clone() for buffer in self._state.buffers]
        self._state.alive.zero_()
        replays: dict[int, list[Work]] = {size: [] for size in reversed(self._sizes)}
        try:
            for size, part in product(replays, self.parts):
                work = partial(part, size, key_length, modes)
                if not is_warm:
                    self._recorder.warm_up(work)
                try:
                    replays[size].append(self._recorder.record(work))
                except RuntimeError as error:  # what torch raises for all that CUDA does not like in a capture
                    self._off = True
                    self.recorded.clear()
                    logger.warning("decode runs eager from here on: no CUDA graph could be captured (%s)", error)
                    return None
        finally:
            for buffer, was in zip(self._state.buffers, kept, strict=True):
                buffer.copy_(was)
        if not is_warm:
            self._warm.add(kind)
            logger.info(
                "decode graphs: %d batch sizes up to %d, captured in %.1f s, %.1f MiB (up to %d keys)",
                len(replays), self._sizes[-1], time.perf_counter() - started,
                max(0, self._recorder.used_bytes() - before) / 2**20, key_length,
            )  # fmt: skip
        return replays


# -- which graphs --------------------------------------------------------------------------------


def possible_graphs(options: EngineOptions, policy: PolicyModel, groups: ParallelGroups | None) -> EngineOptions:
    """Return ``options`` without graphs if the device does not support them; collective over the job if ``groups``."""
    if options.graphs is None:
        return options
    problem = CudaRecorder.problem(policy.device)
    if problem is not None and options.graphs.after == 0:
        logger.info("--enable-cuda-graph has no effect: %s", problem)
    if problem is None and groups and (problem := collective_fault(groups, policy.device)) and groups.is_main:
        logger.warning("decode runs eager: CUDA graphs cannot hold the exchanges of ranks here (%s)", problem)
    return options if problem is None else replace(options, graphs=None)


def collective_fault(groups: ParallelGroups, device: torch.device) -> str | None:
    """Return why a captured all-reduce fails on some rank, or None; collective over the job.

    Tests the groups of a decode step. The pipeline group is not one: stages send between replays.
    """
    used = [each for each in (groups.tensor_group, groups.experts.parallel, groups.experts.tensor) if each.size() > 1]
    if not used:
        return None
    recorder, fault = CudaRecorder(device), ""
    tried = [(group, torch.zeros(1024, device=device)) for group in used]
    works = [partial(dist.all_reduce, sums, group=group) for group, sums in tried]
    try:
        for work in works:  # communicators are made outside of a capture
            recorder.warm_up(work)
        replays = [*map(recorder.record, works)]
    except RuntimeError as error:
        fault = one_line(str(error), 200)
    if any_rank(bool(fault)):  # a rank whose capture failed would not take part in a replay
        return fault or "it failed on another rank"
    for (group, sums), replay in zip(tried, replays, strict=True):
        sums.fill_(1 + group.rank())
        replay()
    wrong = any(bool((sums != sum(range(1 + group.size()))).any()) for group, sums in tried)
    return "a replayed all-reduce gave another sum" if any_rank(wrong) else None


def build_graphs(runner: ModelRunner, policy: PolicyModel, options: GraphOptions | None) -> DecodeGraphs | None:
    """Make graphs of at most ``options.most_sizes`` batch sizes; None for None."""
    if options is None:
        return None
    longest = runner.context.cache.max_length
    key_lengths = graph_key_lengths(longest) if policy.attention.cache.needs_key_length else (longest,)
    sizes = graph_sizes(runner.state.alive.shape[0], options.most_sizes)
    return DecodeGraphs(runner, policy, CudaRecorder(policy.device), sizes, key_lengths, options.after)


def drop_unequal_graphs(runners: Sequence[ModelRunner], rows: int, lockstep_group: dist.ProcessGroup) -> None:
    """Disable graphs if ``rows`` differs between the ranks of the lockstep group; collective."""
    found = max_over({"most": rows, "least": -rows}, lockstep_group)
    if found["most"] == -found["least"]:
        return
    for runner in runners:
        if runner.graphs is not None:
            logger.warning("decode runs eager: ranks that share experts have room for different numbers of sequences")
        runner.graphs = None


def graph_sizes(slots: int, max_sizes: int) -> tuple[int, ...]:
    """Choose at most ``max_sizes`` batch sizes up to ``slots``: powers of two, then the widest gaps are halved.

    Starts at `FEWEST_ROWS`. If not all powers fit, the smallest are left out: small batches take as long as 32 rows,
    because reading the weights dominates.
    """
    powers = [2**exponent for exponent in range(FEWEST_ROWS.bit_length() - 1, slots.bit_length())]
    smaller = [size for size in powers if size < slots]
    sizes = [*smaller[max(0, len(smaller) - max_sizes + 1) :], slots]
    while len(sizes) < max_sizes:
        gaps = [(after - before, before) for before, after in pairwise(sizes)]
        gap, before = max(gaps, default=(0, 0), key=itemgetter(0))
        if gap < 2 * _STEP:
            break
        bisect.insort(sizes, before + gap // 2 // _STEP * _STEP)
    return tuple(sizes)


def graph_key_lengths(max_length: int) -> tuple[int, ...]:
    """Return the key lengths to capture: powers of two from 256, then ``max_length``."""
    doublings = (_SHORTEST_KEY_LENGTH << exponent for exponent in range(max_length.bit_length()))
    return (*(length for length in doublings if length < max_length), max_length)
