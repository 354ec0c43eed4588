#!/usr/bin/env python
"""Make the quickstart's run directory: an earlier run is moved aside, tokenizer and environments are written."""

from __future__ import annotations

import argparse
import runpy
import sys
from datetime import datetime
from pathlib import Path

import yaml

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    run_dir: Path = arguments.run_dir
    try:
        move_aside(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_environments(run_dir / "environments.yaml", arguments.seed)
        runpy.run_path(str(HERE / "make_tokenizer.py"))["main"](run_dir / "tokenizer")
    except OSError as error:
        problem = f"the run directory {run_dir} cannot be made ({error.strerror}); choose another --run-dir"
        print(problem, file=sys.stderr)
        return 2
    return 0


def move_aside(run_dir: Path) -> None:
    """Nothing that was saved is lost: an earlier quickstart keeps its files under another name."""
    if not any((run_dir / part).exists() for part in ("run.json", "warm_start")):
        return
    kept = run_dir.with_name(f"{run_dir.name}.{datetime.now():%Y%m%d-%H%M%S}")
    run_dir.rename(kept)
    print(f"the run that was in {run_dir} is now in {kept}")


def write_environments(path: Path, seed: int) -> None:
    """The example's list, with this run's seed: another seed draws other prompts and demonstrations."""
    entries = yaml.safe_load((HERE / "environments.yaml").read_text())
    for entry in entries:
        entry["args"] = {**entry.get("args", {}), "seed": seed}
    path.write_text(yaml.safe_dump(entries, sort_keys=False))


if __name__ == "__main__":
    sys.exit(main())
