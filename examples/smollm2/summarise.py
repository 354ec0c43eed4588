#!/usr/bin/env python
"""Print what the runs of the example came to: held-out measures before and after, and answers side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_rl.metrics.console import print_table

MEASURES = ("pass@1", "greedy", "reward", "response_length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dirs", type=Path, nargs="+", required=True)
    rows = []
    for directory in parser.parse_args().run_dirs:
        summary = json.loads((directory / "summary.json").read_text())
        before, after = summary["eval"]["before"], summary["eval"]["after"]
        values = (f"{before[name]:.3f} -> {after[name]:.3f}" for name in MEASURES)
        rows.append((directory.name, *values, f"{summary['logprob_gap_max']:.1e}"))
    print_table(sys.stdout, ("held out", *MEASURES, "largest mismatch"), rows)


if __name__ == "__main__":
    main()
