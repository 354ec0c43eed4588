"""Sections in a process of their own, because a kernel that fails spoils the GPU for the rest of its process.

    gpu.py ── names, options ──► worker ── events, a line each ──► a file that gpu.py reads

After a section with an error the worker ends, and ``gpu.py`` starts another for the sections that are left; so
the imports are paid for once where nothing fails. One that hangs is ended from outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmark.common import one_rank, prepare
from tools.benchmark.on_gpu.measure import FULL, REHEARSAL, Bench, Ceilings, one_line
from tools.benchmark.on_gpu.sections import Collection, Event, run_sections

ROOT = Path(__file__).parents[3]
GRACE = 60.0
"""Seconds a section may take beyond its budget for the measurement it is in: kernels compile."""


@dataclass(frozen=True)
class Options:
    """What all sections are told."""

    rehearse: bool
    flags: tuple[str, ...]
    until: float
    """As `time.time` tells it."""
    grace: float = GRACE


def measure_here(names: Sequence[str], options: Options, collection: Collection) -> None:
    """In this process."""
    for event in _events(names, options, {}):
        collection.take(event)


def measure_in_workers(names: Sequence[str], options: Options, collection: Collection) -> None:
    """In processes that may die."""
    left = list(names)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            begun = len(collection.sections)
            why = _one_worker(left, options, collection, Path(folder))
            if collection.current is not None:
                collection.lost(collection.current, why)
            elif len(collection.sections) == begun:  # it did not come to a section: the next would not either
                for name in left:
                    collection.lost(name, why)
            left = [name for name in left if name not in collection.sections]


def _one_worker(names: Sequence[str], options: Options, collection: Collection, folder: Path) -> str:
    """Start one, follow it to its end; how it ended, in a line."""
    events, errors, unread = folder / "events", folder / "errors", ""
    events.write_text("")
    told = [json.dumps(list(names)), json.dumps([options.rehearse, options.flags, options.until]),
            json.dumps(collection.ceilings), str(events)]  # fmt: skip
    command = [sys.executable, "-m", __spec__.name, *told]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with errors.open("wb") as sink, events.open() as lines:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stderr=sink)
        why = "it was out of time and was ended"
        while True:
            ended = process.poll() is not None
            for line in lines:  # after the poll: what it wrote last is not missed
                unread += line
                if unread.endswith("\n"):
                    collection.take(json.loads(unread))
                    unread = ""
            if ended:
                why = f"its process ended with {process.returncode}"
                break
            overdue = collection.current is not None and time.time() > collection.current_end + options.grace
            if overdue or time.time() > options.until + options.grace:
                process.kill()
                process.wait()
                break
            time.sleep(0.2)
    said = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return f"{why}; {said[-1].strip()[:200]}" if said else why


def _events(names: Sequence[str], options: Options, ceilings: dict[str, float | None]):
    prepare()
    with one_rank() as (platform, groups):
        sizes = REHEARSAL if options.rehearse else FULL
        bench = Bench(platform, groups, sizes, tuple(options.flags), Ceilings(**ceilings))
        yield from run_sections(bench, names, options.until)


def main(argv: Sequence[str]) -> None:
    """``names options ceilings file``; JSON but for the last."""
    names, options, ceilings = (json.loads(text) for text in argv[:3])
    failed = False
    with Path(argv[3]).open("a", buffering=1) as file:

        def write(event: Event) -> None:
            file.write(json.dumps(event) + "\n")

        for event in _events(names, Options(*options), ceilings):
            write(event)
            failed = failed or "error" in event.get("row", {})
            if failed and "end" in event:
                break


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        print(one_line(error), file=sys.stderr)
        raise
