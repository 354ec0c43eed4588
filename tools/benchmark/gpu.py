"""What rollouts and training reach on one GPU, beside what the GPU can do at best; under 12 minutes on an H200.

    python -m tools.benchmark.gpu --json gpu.json                          everything
    python -m tools.benchmark.gpu roofline decode_7B                       some sections
    python -m tools.benchmark.gpu decode_7B --flag=--attention-backend=sdpa     with a flag of the training command
    python -m tools.benchmark.gpu --rehearse                               tiny models: whether it works, not how fast

Random weights, made on the device. Wall-clock medians between device synchronisations. A section that fails leaves
its rows and a line that says why, the others go on. Without a CUDA device it rehearses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_rl.metrics.table import format_table
from tools.benchmark.common import provenance, write_record
from tools.benchmark.on_gpu.measure import FULL, REHEARSAL, Row
from tools.benchmark.on_gpu.sections import SECTIONS, Collection, SectionRecord
from tools.benchmark.on_gpu.targets import Target, targets
from tools.benchmark.on_gpu.worker import GRACE, Options, measure_here, measure_in_workers

SECONDS = 690.0
NO_MEANING = "rehearsal on tiny models: these figures mean nothing"


def print_section(name: str, record: SectionRecord) -> None:
    """Its measurements as a table, then what was not measured and why."""
    ending = "" if record.seconds is None else f", {record.seconds:.1f} s"
    ending += "" if record.stopped is None else f", stopped: {record.stopped}"
    print(f"\n{name}{ending}", flush=True)
    measured = [row for row in record.rows if not {"error", "skipped"} & row.keys()]
    if measured:
        columns = list(dict.fromkeys(key for row in measured for key in row))
        print(format_table([column.replace("_", " ") for column in columns],
                           [[_shown(row.get(column)) for column in columns] for row in measured]))  # fmt: skip
    for line in dict.fromkeys(_not_measured(row) for row in record.rows if row not in measured):
        print(line)


def _shown(value: object) -> object:
    return str(value) if isinstance(value, bool) else value


def _not_measured(row: Row) -> str:
    what = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("error", "skipped"))
    kind = "error" if "error" in row else "skipped"
    return f"  {kind}: {what + ': ' if what else ''}{row[kind]}"


def print_targets(claims: Sequence[Target]) -> None:
    """A line each."""
    rows = [[claim.verdict, claim.claim, claim.of, claim.measured, claim.limit] for claim in claims]
    print("\ntargets")
    print(format_table(["verdict", "target", "of", "measured", "limit"], rows))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.gpu")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all without one")
    parser.add_argument("--rehearse", action="store_true", help="tiny models; always so without a CUDA device")
    parser.add_argument("--flag", action="append", default=[], help="--flag=--NAME=VALUE: of every model and engine")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no measurement after these")
    parser.add_argument("--grace", type=float, default=GRACE, help="end a section that is so many seconds overdue")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; use one of {', '.join(SECTIONS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write the record."""
    arguments = parse(argv)
    on_gpu = torch.cuda.is_available()
    rehearse = arguments.rehearse or not on_gpu
    if rehearse:
        print(NO_MEANING + ("" if on_gpu else " (no CUDA device)"))
    origin = provenance("gpu")  # before: the checkout may move on during minutes of measuring
    wanted = arguments.sections or list(SECTIONS)
    names = [name for name in SECTIONS if name == "roofline" or name in wanted]  # the others divide by it
    options = Options(rehearse, tuple(arguments.flag), time.time() + arguments.seconds, arguments.grace)
    collection = Collection()

    def ended(name: str) -> None:
        """Shown and written at once: a run that is cut off leaves what it has."""
        print_section(name, collection.sections[name])
        write_record(arguments.json, {**_record(collection.sections, options), **origin})

    collection.on_end = ended
    (measure_in_workers if on_gpu else measure_here)(names, options, collection)
    print_targets(_claims(collection.sections, options))
    line, errors = tally(collection.sections)
    print(f"\n{line}")
    if errors and not rehearse:
        raise SystemExit(1)


def tally(sections: Mapping[str, SectionRecord]) -> tuple[str, int]:
    """What came of all sections in a line, and how many measurements failed."""
    rows = [row for record in sections.values() for row in record.rows]
    errors, skipped = (sum(kind in row for row in rows) for kind in ("error", "skipped"))
    stopped = [name for name, record in sections.items() if record.stopped]
    ending = f"; stopped early: {', '.join(stopped)}" if stopped else ""
    return f"{len(rows) - errors - skipped} measured, {skipped} skipped, {errors} failed{ending}", errors


def _claims(sections: Mapping[str, SectionRecord], options: Options) -> list[Target]:
    return targets({} if options.rehearse else sections)


def _record(sections: Mapping[str, SectionRecord], options: Options) -> dict[str, object]:
    return {
        "rehearsal": options.rehearse,
        "sections": {name: asdict(record) for name, record in sections.items()},
        "targets": [{**asdict(claim), "verdict": claim.verdict} for claim in _claims(sections, options)],
        "settings": asdict(REHEARSAL if options.rehearse else FULL),
        "flags": list(options.flags),
    }


if __name__ == "__main__":
    main()
