"""Decode attention by backend and type of KV cache, against the time it takes to read the cache's bytes once.

    python -m tools.benchmark.attention [--json FILE]      on a CUDA device
    python -m tools.benchmark.attention --quick            a small one on any device, for tests

One layer's attention alone, heads of a 7B model, lengths equal, drawn from 1 to the longest, or short ones in a cache
for long ones. On CUDA each step is a replay of a captured graph. Wall-clock medians between device synchronisations.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.attention.backend import Backend, Numbers
from megatron_rl.attention.kv_numbers import FP8
from megatron_rl.attention.selection import facts_of
from megatron_rl.inference.kv_cache import Cache, CacheShape
from megatron_rl.inference.paged_cache import PagedCache
from megatron_rl.inference.slot_cache import SlotCache
from megatron_rl.metrics.table import format_table
from megatron_rl.platform import current_platform
from megatron_rl.registry import BACKENDS
from tools.benchmark.common import prepare, provenance, write_record
from tools.benchmark.on_gpu.measure import seconds


@dataclass(frozen=True)
class Sizes:
    """One layer of Qwen2.5-7B."""

    heads: int = 28
    groups: int = 4
    width: int = 128
    rows: tuple[int, ...] = (1, 8, 32, 128)
    longest: tuple[int, ...] = (1024, 8192)
    roomy: tuple[tuple[int, int], ...] = ((16384, 1024),)
    """(longest, what all rows have): early in a rollout of long answers."""
    repeats: int = 9
    inner: int = 20
    """Steps between two synchronisations."""


QUICK = Sizes(heads=4, groups=2, width=16, rows=(2,), longest=(64,), roomy=((128, 32),), repeats=1, inner=1)
TITLES = ("backend", "cache", "rows", "longest", "lengths", "us", "GB/s", "of a copy")


def _copy_rate(device: torch.device, size: int = 2**30) -> float:
    """Bytes read and written a second by a large ``copy_``."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Every backend that runs here, every size."""
    platform = current_platform()
    dtype = torch.bfloat16 if platform.is_cuda else torch.float32
    copied = _copy_rate(platform.device)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, stored in itertools.product(BACKENDS.names(), (dtype, FP8)):
        backend, device = BACKENDS.get(name), facts_of(platform.device)
        if backend.cache is None:
            continue
        problem = backend.problem(device) or backend.cache.unfit(device, Numbers(dtype, stored, sizes.width))
        if problem is not None:
            skipped[f"{name} {_name(stored)}"] = problem
            continue
        equal = [(longest, longest) for longest in sizes.longest]
        ragged = [(longest, None) for longest in sizes.longest]
        for count, (longest, length) in itertools.product(sizes.rows, (*equal, *ragged, *sizes.roomy)):
            row = _one(backend, sizes, count, longest, length, dtype, stored, platform.device)
            rows.append(row | {"of_copy": row["bytes_per_second"] / copied})
    return {"copy_bytes_per_second": copied, "decode": rows, "skipped": skipped}


def _one(
    backend: Backend, sizes: Sizes, count: int, longest: int, length: int | None,
    dtype: torch.dtype, stored: torch.dtype, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """``length`` of all rows; None draws one for each."""
    torch.manual_seed(0)
    cache = _cache(backend, sizes, count, longest, dtype, stored, device)
    lengths = torch.randint(1, longest + 1, (count,)) if length is None else torch.full((count,), length)
    positions = lengths.to(device) - 1
    query = torch.randn(count, 1, sizes.heads, sizes.width, device=device).to(dtype)
    kernel = backend.cache
    # What a model's layers share is prepared once a step.
    plan = kernel.prepare_decode(cache, positions, length or longest)
    step = _replayed(lambda: kernel.decode(query, cache, 0, plan), device)
    took = seconds(step, device, sizes.repeats, sizes.inner)
    read = 2 * int(lengths.sum()) * sizes.groups * sizes.width * stored.itemsize
    return {
        "backend": backend.name, "cache": _name(stored), "rows": count, "longest": longest,
        "lengths": {None: "ragged", longest: "equal"}.get(length, f"{length} each"),
        "seconds": took, "bytes_per_second": read / took,
    }  # fmt: skip


def _cache(
    backend: Backend, sizes: Sizes, count: int, longest: int,
    dtype: torch.dtype, stored: torch.dtype, device: torch.device,
) -> Cache:  # fmt: skip
    shape = CacheShape(1, sizes.groups, sizes.width, longest, stored.itemsize)
    if backend.cache.layout == "slots":
        return SlotCache(shape, count, dtype, device, stored)
    cache = PagedCache(shape, count, backend.cache.page_length, dtype, device, stored)
    order = torch.randperm(cache.table.numel(), device=device).view(cache.table.shape)
    cache.table.copy_(order + 1)
    return cache


def _replayed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return work
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _name(stored: torch.dtype) -> str:
    return "fp8" if stored == FP8 else str(stored).removeprefix("torch.")


def table(record: dict[str, Any]) -> str:
    """For people."""
    lines = [
        (
            row["backend"], row["cache"], str(row["rows"]), str(row["longest"]), row["lengths"],
            f"{1e6 * row['seconds']:.1f}", f"{row['bytes_per_second'] / 1e9:.1f}", f"{row['of_copy']:.1%}",
        )
        for row in record["decode"]
    ]  # fmt: skip
    skipped = [f"{name}: skipped, {problem}" for name, problem in record["skipped"].items()]
    return "\n".join([format_table(TITLES, lines), *skipped])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prepare()
    if not arguments.quick and not torch.cuda.is_available():
        print("needs a CUDA device; --quick runs a small one anywhere")
        return
    record = measure(QUICK if arguments.quick else Sizes())
    print(table(record))
    write_record(arguments.json, provenance("tools.benchmark.attention") | record)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
