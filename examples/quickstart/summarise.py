#!/usr/bin/env python
"""Close the quickstart: one summary of both jobs, printed as tables."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_rl.metrics.console import print_table
from megatron_rl.metrics.jsonl import read_rows

MEASURES = ("pass@1", "pass@8", "greedy", "response_length")
PHASES = {"gen": "generate and grade", "advantages": "advantages and packing", "update_actor": "policy update",
          "eval": "evaluation", "save": "checkpoints"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--times", type=float, nargs=3, required=True, help="start, end of warm start, end of RL")
    arguments = parser.parse_args()
    run_dir: Path = arguments.run_dir
    started, warm_ended, ended = arguments.times
    summary = json.loads((run_dir / "summary.json").read_text())
    warm = json.loads((run_dir / "warm_start" / "summary.json").read_text())
    # Wall clock of the two jobs from outside: imports, evaluation and checkpoints included.
    summary["seconds"] |= {"warm_start": warm_ended - started, "rl": ended - warm_ended, "total": ended - started}
    summary["warm_start"] = {"steps": warm["steps"], "tokens": warm["tokens"]}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print_tables(run_dir, summary)


def print_tables(run_dir: Path, summary: dict) -> None:
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    print("\nHeld-out problems, before and after GRPO")
    rows = [(name, f"{before[name]:.3f}", f"{after[name]:.3f}") for name in MEASURES]
    print_table(sys.stdout, ("", "before", "after"), rows)

    seconds = summary["seconds"]
    steps = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"] > 0]
    total = sum(row["timing_s/step"] for row in steps)
    by_phase = [(label, f"{seconds['by_phase'].get(name, 0.0):.1f}") for name, label in PHASES.items()]
    print("\nGRPO, seconds by phase")
    print_table(sys.stdout, ("", "seconds"), [*by_phase, ("whole job", f"{seconds['rl']:.1f}")])
    rate = sum(row["perf/total_num_tokens"] for row in steps) / max(total, 1e-9)
    print(f"\n{rate:,.0f} tokens/s in the RL steps; warm start {seconds['warm_start']:.0f} s, RL {seconds['rl']:.0f} s")
    print(f"largest |rollout - trainer| log-prob: {summary['logprob_gap_max']:.1e}")
    print(f"\nrun directory: {run_dir}\nopen in a browser: {run_dir / 'report.html'}")


if __name__ == "__main__":
    main()
