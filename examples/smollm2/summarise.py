#!/usr/bin/env python
"""Print what the runs of the example came to: held-out measures before and after, and answers side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_rl.metrics.console import print_table

MEASURES = ("pass@1", "greedy", "reward", "response_length", "truncated")
SHOWN = 5
"""Questions of which the answers are printed, of the first run."""
WIDTH = 320
"""Characters of a question or an answer that are printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dirs", type=Path, nargs="+", required=True)
    directories = parser.parse_args().run_dirs
    for directory in directories:
        if len([*(directory / "rollouts").glob("eval_*.jsonl")]) < 2:
            sys.exit(f"{directory}: stopped before the evaluation after training; repeat the command to continue it")
    summaries = {directory.name: json.loads((directory / "summary.json").read_text()) for directory in directories}
    print_table(sys.stdout, ("held out", *MEASURES, "minutes", "largest mismatch"), rows_of(summaries))
    print()
    print_table(sys.stdout, ("question", "before", "after"), answers(directories[0]))


def rows_of(summaries: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each run, and their mean; pass@1 with half of its 95 % interval."""
    ends = {name: (summary["eval"]["before"], summary["eval"]["after"]) for name, summary in summaries.items()}
    rows = []
    for name, (before, after) in ends.items():
        first, *others = ((before[measure], after[measure]) for measure in MEASURES)
        margins = before["pass@1_ci95"], after["pass@1_ci95"]
        pass_rate = " -> ".join(f"{value:.3f} ± {margin:.3f}" for value, margin in zip(first, margins, strict=True))
        cells = (f"{one:.3f} -> {other:.3f}" for one, other in others)
        seconds, gap = summaries[name]["seconds"]["run"], summaries[name]["logprob_gap_max"]
        rows.append((name, pass_rate, *cells, f"{seconds / 60:.1f}", f"{gap:.1e}"))
    if len(rows) > 1:
        means = (" -> ".join(f"{mean(pair[end][m] for pair in ends.values()):.3f}" for end in (0, 1)) for m in MEASURES)
        rows.append(("mean", *means, "", ""))
    return rows


def answers(directory: Path) -> list[tuple[str, str, str]]:
    """The first held-out questions with their greedy answers before and after; ``*`` marks the right ones."""
    first, *_, last = sorted((directory / "rollouts").glob("eval_*.jsonl"))
    before, after = (greedy_answers(path) for path in (first, last))
    known = [task for task in before if task in after][:SHOWN]
    return [(before[task][0], before[task][1], after[task][1]) for task in known]


def greedy_answers(path: Path) -> dict[str, tuple[str, str]]:
    """Of each task the user's last message, and the answer."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {row["task_id"]: (question_of(row["prompt"]), told(row)) for row in rows if row["greedy"]}


def question_of(prompt: str) -> str:
    """What stands in the last turn of the user, of a prompt in ChatML."""
    return on_a_line(prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0])


def told(row: Mapping[str, Any]) -> str:
    """The answer on one line."""
    text = on_a_line(row["completion"])
    return f"{'* ' if row['correct'] else ''}{text}{'' if row['finish_reason'] == 'stop' else ' ...'}"


def on_a_line(text: str) -> str:
    """Lines joined by slashes, shortened."""
    joined = " / ".join(line.strip() for line in text.splitlines() if line.strip())
    return joined if len(joined) <= WIDTH else f"{joined[:WIDTH]} [...]"


if __name__ == "__main__":
    main()
