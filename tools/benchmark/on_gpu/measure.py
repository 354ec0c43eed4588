"""What every section is given, how it takes time, what the machine can do at best, and how a failure stays one line."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.inference.graphs import CudaRecorder
from megatron_rl.platform import Platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization import formats
from tools.benchmark.common import Shape
from tools.benchmark.on_gpu.profile import largest_kernels
from tools.benchmark.on_gpu.shapes import EXPERTS, LARGE, MIDDLE, SMALL, ExpertShape

Row = dict[str, Any]
"""One measurement: names and numbers. ``error`` or ``skipped`` stand in place of numbers, in one line."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    small: Shape = SMALL
    middle: Shape = MIDDLE
    large: Shape = LARGE.cut(16)
    attention: Shape = MIDDLE.cut(4)
    experts: ExpertShape = EXPERTS.cut(8)
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)  # rows of a decode step, and tokens of the single products
    largest_eager: int = 32  # eager steps wait for the host; more rows show nothing new
    distinct_prompts: int = 32  # larger batches are groups that share these prompts, as in GRPO
    context: int = 1024
    long_context: int = 4096
    bursts: int = 5  # timed bursts of decode steps; their median counts
    steps: int = 8  # decode steps a burst
    repeats: int = 9
    copied_bytes: int = 2**30
    rotated_bytes: int = 2**28  # weights, or keys, that are gone through before the same come again: more than a cache
    cube: int = 8192  # side of the products whose speed is the peak
    samples: int = 32  # of a training step, ``context`` tokens each
    bin_tokens: int = 8192
    prompts: int = 16
    group: int = 8
    answer_tokens: int = 256  # of the GRPO step, prompts as long as answers
    attention_rows: tuple[int, ...] = (1, 8, 32, 128)  # of the attention measured alone, one layer of ``middle``
    longest: tuple[int, ...] = (1024, 8192)
    roomy: tuple[tuple[int, int], ...] = ((16384, 1024),)  # (longest, what all rows have): early in long answers
    inner: int = 20  # calls of a kernel in a captured graph


_TINY = {"hidden": 64, "ffn": 96, "layers": 2, "heads": 4, "groups": 2, "vocab": 512}
FULL = Sizes()
REHEARSAL = Sizes(
    *(replace(shape, **_TINY) for shape in (SMALL, MIDDLE)),
    *(replace(shape, **_TINY, whole_layers=4) for shape in (LARGE, MIDDLE)),
    replace(EXPERTS, **_TINY, whole_layers=4, experts=4, active=2, head_width=16),
    batches=(1, 4), distinct_prompts=2, context=16, long_context=32, bursts=1, steps=2, repeats=1,
    copied_bytes=2**16, rotated_bytes=2**12, cube=64, samples=4, bin_tokens=64, prompts=2, group=4, answer_tokens=6,
    attention_rows=(2,), longest=(64,), roomy=((128, 32),), inner=1,
)  # fmt: skip
"""Small enough for a CPU, tied or untied and cut like the originals."""


@dataclass
class Bench:
    """What a section works with."""

    platform: Platform
    groups: ParallelGroups
    sizes: Sizes
    flags: tuple[str, ...] = ()
    """Of the user, for every model and engine."""
    bandwidth: float | None = None
    """Bytes read and written a second by a large copy; None until ``roofline`` has measured it."""
    peak: float | None = None
    """bf16 flop/s of a large product; None until then."""
    kernels: list[Row] = field(default_factory=list)
    """What `profile` has found in this section."""

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return self.platform.device

    def seconds(self, work: Callable[[], object], inner: int = 1) -> float:
        """Median wall-clock seconds of one ``work``, the device idle before and after each ``inner`` of them."""
        times = []
        for _ in range(self.sizes.repeats + 1):  # the first is not counted
            self.platform.synchronize()
            started = time.perf_counter()
            for _ in range(inner):
                work()
            self.platform.synchronize()
            times.append((time.perf_counter() - started) / inner)
        return statistics.median(times[1:])

    def kernel_seconds(self, work: Callable[[], object], inner: int) -> float:
        """The same without the host's share: on CUDA ``inner`` calls of ``work`` are captured and replayed.

        A launch from Python takes longer than the kernels of a small batch.
        """
        if not self.platform.is_cuda:
            return self.seconds(work, inner)

        def cycle() -> None:  # kernels compile before the capture, and a cycle of weights comes round
            for _ in range(inner):
                work()

        recorder = CudaRecorder(self.device)
        recorder.warm_up(cycle)
        return self.seconds(recorder.record(cycle)) / inner

    def profile(self, what: str, work: Callable[[], object]) -> None:
        """Note the largest kernels of one ``work``, or why they are not known."""
        self.kernels += guarded(largest_kernels(self.platform, work), {"of": what})

    def forget(self) -> None:
        """Give back the memory of what has gone out of use."""
        gc.collect()
        torch.cuda.empty_cache()


def guarded(rows: Iterator[Row], labels: Mapping[str, Any]) -> Iterator[Row]:
    """``rows`` with ``labels``; should they break off, the reason is the last row. A refused flag is no failure."""
    try:
        for row in rows:
            yield {**labels, **row}
    except (ConfigError, SystemExit) as refusal:  # the latter is how `benchmark_config` says it
        yield {**labels, "skipped": one_line(refusal)}
    except Exception as error:  # noqa: BLE001  whatever a kernel or a driver raises must not end the other sections
        yield {**labels, "error": one_line(error)}


def one_line(error: BaseException) -> str:
    """The kind and the first line that says something, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def roofline(bench: Bench) -> Iterator[Row]:
    """Fills ``bench.bandwidth`` and ``bench.peak``."""
    size = bench.sizes.copied_bytes
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.bandwidth = 2 * size / bench.seconds(lambda: target.copy_(source))
    yield {"what": "copy, read and written", "rate": bench.bandwidth, "unit": "B/s"}
    side = bench.sizes.cube
    a, b = _random(bench, side), _random(bench, side)
    bench.peak = _flops(bench, side, lambda: a @ b.t())
    yield {"what": f"bf16 product, {side} cubed", "rate": bench.peak, "unit": "flop/s"}
    for fast in (True, False):
        label = f"fp8 product by row, {side} cubed, fast accumulation {'on' if fast else 'off'}"
        yield from guarded(_fp8_peak(bench, fast), {"what": label})


def _fp8_peak(bench: Bench, fast: bool) -> Iterator[Row]:
    side = bench.sizes.cube
    a, b = _random(bench, side).to(formats.FP8), _random(bench, side).to(formats.FP8)
    yield {"rate": _flops(bench, side, scaled_product(a, lambda: b, side, fast)), "unit": "flop/s"}


def scaled_product(
    codes: torch.Tensor, weight: Callable[[], torch.Tensor], rows: int, fast: bool
) -> Callable[[], torch.Tensor]:
    """``torch._scaled_mm`` with a scale a row of both; ``weight`` gives [rows, K] codes, anew each time."""
    of_tokens, of_rows = (torch.ones(shape, device=codes.device) for shape in ((len(codes), 1), (1, rows)))
    return lambda: torch._scaled_mm(
        codes, weight().t(), scale_a=of_tokens, scale_b=of_rows, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _random(bench: Bench, side: int) -> torch.Tensor:
    """Random numbers: zeros take less power, and a GPU multiplies them faster."""
    return torch.randn(side, side, device=bench.device, dtype=torch.bfloat16)


def _flops(bench: Bench, side: int, work: Callable[[], object]) -> float:
    return 2 * side**3 / bench.seconds(work, inner=3)
