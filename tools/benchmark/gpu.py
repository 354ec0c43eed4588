"""What rollouts and training reach on one GPU, beside what the GPU can do at best.

    python -m tools.benchmark.gpu --json gpu.json                          everything, under 14 minutes on an H200
    python -m tools.benchmark.gpu roofline decode_7B                       some sections
    python -m tools.benchmark.gpu decode_7B --flag=--attention-backend=sdpa     with a flag of the training command
    python -m tools.benchmark.gpu decode_7B --switch=dependent --switch=thin    with what is off until it is timed
    python -m tools.benchmark.gpu --rehearse                               tiny models: whether it works, not how fast

Random weights, made on the device. Wall-clock medians between device synchronisations. A measurement that fails is a
line that says why, and the others go on; the record is written after each. Steps are profiled once beside: the largest
kernels are a table behind a section's. A kernel that fails may spoil the GPU for the rest of its process: `gpu_calls`
runs each section in a process of its own. Without a CUDA device it rehearses.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_rl.metrics.console import format_table
from megatron_rl.platform import current_platform
from tools.benchmark.common import Shape, benchmark_config, provenance, ranks_of, write_record
from tools.benchmark.on_gpu import engines, kernels, training
from tools.benchmark.on_gpu.measure import FULL, REHEARSAL, Bench, Row, guarded, roofline
from tools.benchmark.on_gpu.peer import peer
from tools.benchmark.on_gpu.shapes import BF16, FP8

SECONDS = 840.0
SWITCHES = {
    "dependent": ("megatron_rl.quantization.dependent_launch", "DEPENDENT_LAUNCHES"),
    "thin": ("megatron_rl.models.rollout_ops", "THIN_PRODUCTS"),
}
"""Module and constant of kernels' ways that are off until a GPU has shown that they are faster."""
NO_MEANING = "rehearsal on tiny models: these figures mean nothing"
Sections = Mapping[str, Sequence[Row]]


class Section(NamedTuple):
    """One part of the benchmark."""

    measure: Callable[[Bench], Iterator[Row]]
    budget: float
    """Seconds after which it measures nothing more; looked at between measurements. A rehearsal measures everything."""


SECTIONS: dict[str, Section] = {
    "roofline": Section(roofline, 10),
    "decode_attention": Section(kernels.decode_attention, 35),
    "products": Section(kernels.products, 35),
    "activations": Section(kernels.activations, 10),
    "requantise": Section(kernels.requantise, 25),
    "decode_0.5B": Section(partial(engines.decode, model="small"), 50),
    "decode_7B": Section(partial(engines.decode, model="middle"), 160),
    "decode_30B": Section(partial(engines.decode, model="experts", kinds=(BF16, FP8)), 90),
    "decode_32B": Section(partial(engines.decode, model="large"), 150),
    "attention": Section(engines.attention, 90),
    "peer": Section(peer, 60),
    "prefill": Section(engines.prefill, 20),
    "training": Section(training.training, 35),
    "grpo": Section(training.grpo, 30),
}


def measured(section: Section, bench: Bench, until: float) -> Iterator[Row]:
    """Its rows, as long as there is time; a last one says if there was not. ``until`` as `time.time` tells it."""
    end = min(time.time() + section.budget, until)
    rows = guarded(section.measure(bench), {})
    while time.time() < end:
        row = next(rows, None)
        if row is None:
            return
        yield row
    rows.close()
    yield {"skipped": "its time was over"}


def show(name: str, rows: Sequence[Row]) -> None:
    """The measurements as a table, then what was not measured and why."""
    print(f"\n{name}", flush=True)
    table = [row for row in rows if not {"error", "skipped"} & row.keys()]
    columns = list(dict.fromkeys(key for row in table for key in row))
    if table:
        shown = [{key: str(value) if isinstance(value, bool) else value for key, value in row.items()} for row in table]
        print(format_table([column.replace("_", " ") for column in columns],
                           [[row.get(key) for key in columns] for row in shown]))  # fmt: skip
    for row in rows:
        if row not in table:
            kind = "error" if "error" in row else "skipped"
            what = ", ".join(f"{key} {value}" for key, value in row.items() if key != kind)
            print(f"  {kind}: {what + ': ' if what else ''}{row[kind]}")


def tally(sections: Sections) -> tuple[str, int]:
    """What came of all sections in a line, and how many measurements failed."""
    rows = [row for section in sections.values() for row in section]
    errors, skipped = (sum(kind in row for row in rows) for kind in ("error", "skipped"))
    return f"{len(rows) - errors - skipped} measured, {skipped} skipped, {errors} failed", errors


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.gpu")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all without one")
    parser.add_argument("--rehearse", action="store_true", help="tiny models; always so without a CUDA device")
    parser.add_argument("--flag", action="append", default=[], help="--flag=--NAME=VALUE: of every model and engine")
    parser.add_argument("--switch", action="append", default=[], choices=SWITCHES, help="measure with this switched on")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no measurement after these")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; use one of {', '.join(SECTIONS)}")
    for module, constant in map(SWITCHES.get, arguments.switch):
        setattr(importlib.import_module(module), constant, True)
    rehearse = arguments.rehearse or not torch.cuda.is_available()
    if rehearse:
        print(NO_MEANING + ("" if torch.cuda.is_available() else " (no CUDA device)"))
    sizes = REHEARSAL if rehearse else FULL
    # The commit is read before: the checkout may move on during minutes of measuring.
    given = {"flags": arguments.flag, "switches": arguments.switch}
    record = {"rehearsal": rehearse, "settings": asdict(sizes), **given, **provenance("gpu")}
    wanted = arguments.sections or list(SECTIONS)
    until, sections, found = math.inf if rehearse else time.time() + arguments.seconds, {}, {}
    with ranks_of(benchmark_config(Shape.parse("64x1"), 16)) as groups:
        bench = Bench(current_platform(), groups, sizes, tuple(arguments.flag))
        for name in (name for name in SECTIONS if name == "roofline" or name in wanted):  # the others divide by it
            sections[name], found[name] = [], []
            bench.kernels = found[name]
            section = SECTIONS[name]._replace(budget=math.inf) if rehearse else SECTIONS[name]
            for row in measured(section, bench, until):
                sections[name].append(row)
                write_record(arguments.json, record | {"sections": sections, "kernels": found})
            bench.forget()
            show(name, sections[name])
            if found[name]:
                show(f"largest kernels of {name}", found[name])
    line, errors = tally(sections)
    print(f"\n{line}")
    if errors and not rehearse:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
