#!/usr/bin/env python
"""How far rollouts of a published model are from its trainer, in every format: one step of GRPO each, and a table.

    python examples/fidelity/published.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--run-dir DIR] [FLAGS OF TRAIN]

The prompts are those of the environment `instructions`: 128 answers of at most 64 tokens, drawn by the rollout's own
weights. int4 is the control: a format that is known to be too coarse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from settings import OWN

from megatron_rl.metrics.console import print_table
from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.registry import RECIPES

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "grpo-prompts-per-step": 16, "grpo-group-size": 8, "global-batch-size": 128, "grpo-kl-beta": 0, "train-iters": 1,
    "rl-max-new-tokens": 64, "seq-length": 256, "micro-batch-size": 8, "lr": 1e-6, "rl-correction": "none",
}  # fmt: skip
SWITCHES = ("perform-rl-step", "rl-share-prompts", "no-save-optim", "resume")
MEASURES = {
    "mean gap": "parity/gap_mean", "p95": "parity/p95", "largest": "parity/max", "k3 KL": "parity/k3_kl",
    "top-1 agreement": "parity/top1_agreement", "engine against emulation": "parity/emulation_gap_mean",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as --load-hf")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "published")
    options, further = parser.parse_known_args()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    environments = options.run_dir / "environments.yaml"
    environments.write_text("- environment: instructions\n")
    formats = {name: ["--rl-rollout-quantization", OWN.get(name, name)] for name in (*RECIPES.names(), *OWN)}
    formats |= {f"KV cache {name}": ["--rl-kv-cache-dtype", name] for name in ("bf16", "fp8")}
    values = {"load-hf": options.model, "langrl-env-config": environments, **FLAGS}
    common = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    common += [*(f"--{name}" for name in SWITCHES), *further]
    rows = []
    for name, flags in formats.items():
        run_dir = options.run_dir / name.replace(" ", "_")
        if not is_finished(run_dir):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            subprocess.run([*command, "train_rl.py", *common, *flags, "--run-dir", str(run_dir)], cwd=ROOT, check=True)
        (row,) = read_rows(run_dir / "metrics.jsonl")
        rows.append((name, *(_told(row.get(measure)) for measure in MEASURES.values())))
    print_table(sys.stdout, ("format", *MEASURES), rows)
    return 0


def is_finished(run_dir: Path) -> bool:
    """Whether this format has been measured: the command goes on where it was stopped."""
    facts = run_dir / "run.json"
    return facts.is_file() and json.loads(facts.read_text())["status"] == "finished"


def _told(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


if __name__ == "__main__":
    sys.exit(main())
