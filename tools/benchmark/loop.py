"""Where the seconds of an RL run go, read from its ``metrics.jsonl``.

    python -m tools.benchmark.loop runs/quickstart
    python -m tools.benchmark.loop runs/profile --quickstart     run the quickstart there first

Wall-clock seconds of rank 0, from the first row to the last.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.metrics.names import timing
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.table import format_table
from tools.benchmark.common import provenance, write_record

Row = Mapping[str, Any]

UPDATE_PHASES = ("old_log_prob", "ref", "update_actor")


def shares_by_phase(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds by phase, which add up to the run's; ``other`` is what no phase covers.

    The environments' reward is waited for inside ``gen``, which is counted here without it.
    """
    totals = {
        "gen": total(rows, timing("gen")) - total(rows, timing("reward")),
        "reward wait": total(rows, timing("reward")),
        "advantages": total(rows, timing("advantages")),
        "update": sum(total(rows, timing(phase)) for phase in UPDATE_PHASES),
        "eval": total(rows, timing("eval")),
        "save": total(rows, timing("save")),
    }
    return totals | {"other": max(0.0, wall_seconds(rows) - sum(totals.values()))}


def wall_seconds(rows: Sequence[Row]) -> float:
    """From the start of the first row's work to the end of the last row's."""
    first, last = (datetime.fromisoformat(row["time"]) for row in (rows[0], rows[-1]))
    own = sum(rows[0].get(timing(phase)) or 0.0 for phase in ("step", "eval"))
    return (last - first).total_seconds() + own


def throughput(rows: Sequence[Row]) -> dict[str, float]:
    """Tokens a second, all ranks together.

    Groups whose rewards are all equal are generated but not trained on. The number of trained
    tokens is not logged: it is taken to be the share of groups with a signal.
    """
    generated = total(rows, "perf/generated_tokens")
    trained = sum((row.get("perf/total_num_tokens") or 0.0) * row.get("training/signal_share", 1.0) for row in rows)
    update = sum(total(rows, timing(phase)) for phase in UPDATE_PHASES)
    return {
        "rollout_tokens_per_second": generated / max(total(rows, timing("gen")), 1e-9),
        "training_tokens_per_second": trained / max(update, 1e-9),
    }


def total(rows: Sequence[Row], name: str) -> float:
    """Sum of a metric over the rows that have it."""
    return sum(row.get(name) or 0.0 for row in rows)


def run_quickstart(run_dir: Path) -> None:
    """The real thing, warm start included: it takes minutes."""
    script = Path(__file__).parents[2] / "examples" / "quickstart" / "run.sh"
    subprocess.run(["bash", str(script), "--run-dir", str(run_dir.resolve())], check=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.loop")
    parser.add_argument("run_dir", type=Path, help="directory with metrics.jsonl")
    parser.add_argument("--quickstart", action="store_true", help="run the quickstart into run_dir first")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    if arguments.quickstart:
        run_quickstart(arguments.run_dir)
    run = RunDirectory(arguments.run_dir)
    rows = read_rows(run.metrics)
    if not rows:
        parser.error(f"{run.metrics} has no rows; give the directory of a run, or add --quickstart")

    seconds, speeds = shares_by_phase(rows), throughput(rows)
    wall = sum(seconds.values())
    steps = max(rows[-1]["step"], 1)
    table = [[name, spent, 1e3 * spent / steps, f"{spent / wall:.1%}"] for name, spent in seconds.items()]
    print(format_table(["phase", "seconds", "ms / step", "share"], table))
    print(f"{steps} steps, {wall:.1f} s; " + ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()))
    facts = run.read_facts()
    record = {"seconds": seconds, "share": {name: spent / wall for name, spent in seconds.items()}}
    record |= speeds | {"steps": steps, "run_commit": facts.get("git_commit"), "run_command": facts.get("command")}
    write_record(arguments.json, record | provenance("loop"))


if __name__ == "__main__":
    main()
