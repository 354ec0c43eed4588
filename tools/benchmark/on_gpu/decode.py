"""Decode steps of the real engine, by batch, format, graphs and attention, against the bytes they must read.

The cache is filled by prefill: a prompt of its own for every row up to ``Sizes.distinct_prompts``, above that
groups that share a prompt. Timed bursts include the host's read and bookkeeping. Rows reach the context asked for
to within the few tokens that others decode while the last prompts are read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.attention.selection import facts_of
from megatron_rl.registry import BACKENDS
from tools.benchmark.on_gpu.engines import Rolling, open_engine
from tools.benchmark.on_gpu.measure import Bench, Row, guarded, wait, without_effect
from tools.benchmark.on_gpu.shapes import (
    BF16,
    FP8,
    FP8_KV,
    Format,
    ModelShape,
    decode_bytes,
    ratio,
    roofline_ms,
)

GRAPHS = ("--enable-cuda-graph", "--inference-dynamic-batching-num-cuda-graphs=8")
"""Captures of the batches that are measured, the powers of two, and few others."""
ATTENTION_BATCHES = (32, 256)


def graphs_problem(bench: Bench) -> str | None:
    """Why this run has no CUDA graphs; None if it has."""
    return without_effect(GRAPHS) if bench.platform.is_cuda else "CUDA graphs need a CUDA device"


@dataclass(frozen=True)
class Variant:
    """One engine."""

    format: Format
    graphs: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Beyond the model's."""
        return (*self.format.flags, *(GRAPHS if self.graphs else ()))


VARIANTS = tuple(Variant(kind, graphs) for kind in (BF16, FP8, FP8_KV) for graphs in (False, True))


def decode_small(bench: Bench) -> Iterator[Row]:
    """The 0.5B."""
    yield from _by_variant(bench, bench.sizes.small)


def decode_middle(bench: Bench) -> Iterator[Row]:
    """The 7B."""
    yield from _by_variant(bench, bench.sizes.middle)


def decode_large(bench: Bench) -> Iterator[Row]:
    """The 32B with layers cut: ``whole_ms`` takes the same ratio to the roofline for the whole model."""
    yield from _by_variant(bench, bench.sizes.large)


def attention(bench: Bench) -> Iterator[Row]:
    """Every attention backend of this device, at two contexts, on a few layers of the 7B."""
    sizes = bench.sizes
    for name in BACKENDS.names():
        labels = {"model": sizes.attention.name, "layers": sizes.attention.layers, "attention": name}
        backend = BACKENDS.get(name)
        problem = "it has no kernel over the KV cache" if backend.cache is None else None
        problem = problem or backend.problem(facts_of(bench.device))
        if problem is not None:
            yield {**labels, "skipped": problem}
            continue
        for context in (sizes.context, sizes.long_context):
            batches = [batch for batch in sizes.batches if batch in ATTENTION_BATCHES] or sizes.batches[-1:]
            flags = (f"--attention-backend={name}", *(() if graphs_problem(bench) else GRAPHS))
            rows = decode_rows(bench, sizes.attention, BF16, batches, context, flags)
            yield from guarded(rows, labels)


def _by_variant(bench: Bench, shape: ModelShape) -> Iterator[Row]:
    for variant in VARIANTS:
        labels = {"model": shape.name, "layers": shape.layers, "format": variant.format.name, "graphs": variant.graphs}
        missing = (graphs_problem(bench) if variant.graphs else None) or without_effect(variant.format.flags)
        if missing is not None:
            yield {**labels, "skipped": missing}
            continue
        most = bench.sizes.batches[-1] if variant.graphs else bench.sizes.largest_eager
        batches = [batch for batch in bench.sizes.batches if batch <= most]
        rows = decode_rows(bench, shape, variant.format, batches, bench.sizes.context, variant.flags)
        yield from guarded(rows, labels)


def decode_rows(
    bench: Bench, shape: ModelShape, kind: Format, batches: Sequence[int], context: int, flags: Sequence[str]
) -> Iterator[Row]:
    """One row a batch size, all by one engine."""
    bench.forget()
    sizes = bench.sizes
    # The prefill takes a few engine steps, in each of which the rows that are ready decode a burst.
    most_fills = min(max(batches), sizes.distinct_prompts)
    new_tokens = 1 + sizes.steps * (most_fills + 2 + sizes.bursts)
    rolling = open_engine(bench, shape, batch=max(batches), length=context + new_tokens, flags=flags)
    rolling.warm()
    with rolling.rollouts():
        for batch in batches:
            step, rows = _step_seconds(bench, rolling, batch, context, new_tokens)
            least = roofline_ms(decode_bytes(shape, kind, batch, context), bench.ceilings.bandwidth)
            row = {"batch": batch, "context": context, "step_ms": 1e3 * step, "roofline_ms": least, "rows": rows,
                   "ratio": ratio(1e3 * step, least), "tokens_per_second": batch / step}  # fmt: skip
            if shape.whole_layers:
                whole = decode_bytes(shape.whole, kind, batch, context) / decode_bytes(shape, kind, batch, context)
                row["whole_ms"] = 1e3 * step * whole
            yield row


def _step_seconds(
    bench: Bench, rolling: Rolling, batch: int, context: int, new_tokens: int
) -> tuple[float, float]:
    """Median seconds of a decode step over the bursts, and how many rows were computed in each."""
    engine, prompts = rolling.engine, min(batch, bench.sizes.distinct_prompts)
    # Half of the timed steps come before the context asked for, half after it.
    ahead = min(bench.sizes.steps * (2 + bench.sizes.bursts // 2), context // 2)
    rolling.submit(
        prompts=prompts, copies=batch // prompts, prompt_tokens=context - ahead, new_tokens=new_tokens
    )
    read = -1
    while engine.statistics.prefill_tokens > read:  # ends with a burst of all rows, which is not timed
        read = engine.statistics.prefill_tokens
        engine.step()
    times, before = [], engine.statistics.decode_rows
    first = engine.statistics.decode_steps
    for _ in range(bench.sizes.bursts):
        at = engine.statistics.decode_steps
        wait(bench.device)
        started = time.perf_counter()
        engine.step()
        wait(bench.device)
        times.append((time.perf_counter() - started) / (engine.statistics.decode_steps - at))
    rows = (engine.statistics.decode_rows - before) / (engine.statistics.decode_steps - first)
    engine.abort()
    return statistics.median(times), rows
