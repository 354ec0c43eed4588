#!/usr/bin/env python
"""Chains of sums with learning rates, formats and rewards that go wrong: the runs of docs/measurements/stability.md.

python examples/fidelity/stability.py [--runs "lr_x1 lr_x3"] [--seed N] [--run-dir DIR]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import yaml
from settings import HARD
from study import ROOT, json_of, launch, warm_start

from megatron_rl.metrics.alarms import find_alarms
from megatron_rl.metrics.jsonl import read_steps

SHORT = replace(HARD, steps=40, held_out=64)
SETTINGS = {
    **{f"lr_x{times}": (round(times * HARD.lr, 6), "none", "arithmetic") for times in (1, 3, 10, 30)},
    **{f"int4_lr_x{times}": (round(times * HARD.lr, 6), "int4", "arithmetic") for times in (1, 3)},
    "signed": (HARD.lr, "none", "examples/fidelity/other_rewards.py:Signed"),
    "length": (HARD.lr, "none", "examples/fidelity/other_rewards.py:Length"),
}
"""Learning rate, format of the rollouts, environment."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=" ".join(SETTINGS), help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "stability")
    arguments = parser.parse_args()
    folder = arguments.run_dir / "hard"
    base = folder / f"seed_{arguments.seed}"
    warm_start(SHORT, arguments.seed, folder)
    for name in arguments.runs.split():
        lr, recipe, environment = SETTINGS[name]
        entry = {"environment": environment, "args": {**SHORT.environment, "seed": arguments.seed}}
        (base / "environments.yaml").write_text(yaml.safe_dump([entry]))
        changes = ["--min-lr", f"{lr:g}", "--lr-decay-style", "constant", "--rl-samples-per-eval-prompt", "4"]
        start = ["--pretrained-checkpoint", str(base / "warm_start" / "checkpoints")]
        flags = replace(SHORT, lr=lr).grpo(recipe, "none")
        launch([*flags, *changes, *start], base, arguments.seed, base / name)
        before_and_after = json_of(base / name / "summary.json")["eval"]
        print(name, *(f"{which} {row['pass@1']:.3f}" for which, row in before_and_after.items()))
        for alarm in find_alarms(read_steps(base / name / "metrics.jsonl")):
            print(f"    step {alarm.step}: {alarm.kind}: {alarm.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
