#!/usr/bin/env python
"""The table of `seeds.sh`; exit code 1 when a seed misses what the quickstart promises."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_rl.metrics.console import format_table

START_AT_MOST = 0.45
END_AT_LEAST = 0.95
HEADERS = ("seed", "pass@1 before", "after", "pass@8", "greedy", "length", "gap max", "warm-up s", "RL s", "kept")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", required=True)
    arguments = parser.parse_args()
    rows, kept = [], 0
    for seed in arguments.seeds:
        summary = json.loads((arguments.run_dir / f"seed_{seed}" / "summary.json").read_text())
        before, after, seconds = summary["eval"]["before"], summary["eval"]["after"], summary["seconds"]
        good = before["pass@1"] <= START_AT_MOST and after["pass@1"] >= END_AT_LEAST
        kept += good
        rows.append(
            (
                seed,
                *(f"{value:.3f}" for value in (before["pass@1"], after["pass@1"], after["pass@8"], after["greedy"])),
                f"{before['response_length']:.1f} -> {after['response_length']:.1f}",
                f"{summary['logprob_gap_max']:.1e}",
                f"{seconds['warm_start']:.0f}",
                f"{seconds['rl']:.0f}",
                "yes" if good else "NO",
            )
        )
    print(format_table(HEADERS, rows))
    print(f"{kept} of {len(rows)} seeds start at {START_AT_MOST} or less and end at {END_AT_LEAST} or more")
    return 0 if kept == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
