#!/usr/bin/env python
"""Break quantised rollouts on purpose, and see that the parity gate tells.

    python examples/fidelity/controls.py BREAKAGE [train_rl.py flags]

healthy leaves everything as it is; stale keeps the quantised copies of an earlier step; negated turns the sign of
one layer's copy; inverted gives the correction's weights the wrong way round.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.algorithms import Terms, TokenBatch
from megatron_rl.algorithms.corrections import token_tis
from megatron_rl.main import main as train_rl
from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.quantization.rollout import RolloutQuantization

STEPS = 6
MEASURES = ("parity/k3_kl", "parity/gap_mean", "parity/emulation_gap_mean", "parity/top1_agreement",
            "rollout_corr/residual_gap")  # fmt: skip


def stale() -> None:
    """Nobody hears of an update: the copies are those of the last parity check."""
    RolloutQuantization.weights_changed = lambda self: None


def negated() -> None:
    """One layer's product comes out with the wrong sign."""
    refresh = QuantizedLinears.refresh

    def broken(self: QuantizedLinears) -> None:
        refresh(self)
        with torch.no_grad():
            self.layers[0].weight.scales.neg_()

    QuantizedLinears.refresh = broken


def inverted() -> None:
    """Engine over trainer instead of trainer over engine."""
    right = token_tis.Correction.__call__

    def wrong(self: token_tis.Correction, batch: TokenBatch) -> Terms:
        swapped = {"old_logprobs": batch.inference_logprobs, "inference_logprobs": batch.old_logprobs}
        return right(self, replace(batch, **swapped))

    token_tis.Correction.__call__ = wrong


BREAKAGES = {"healthy": lambda: None, "stale": stale, "negated": negated, "inverted": inverted}


def run_all(folder: Path, flags: list[str], warm_start: Path) -> dict[str, dict]:
    """Every breakage for a few steps; what the gate measured (worst step) and said. Writes ``controls.json``."""
    results = {}
    for name in BREAKAGES:
        run_dir = folder / "controls" / name
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, name, *flags, "--run-dir", str(run_dir), "--resume"]
        command += ["--tokenizer-model", str(warm_start.parent / "tokenizer"), "--seed", "1"]
        command += ["--langrl-env-config", str(warm_start.parent / "environments.yaml")]
        command += ["--pretrained-checkpoint", str(warm_start / "checkpoints")]
        command += ["--rl-mismatch-interval", "1", "--exit-interval", str(STEPS)]
        log = run_dir.with_suffix(".log")
        with log.open("w") as stream:
            subprocess.run(command, stdout=stream, stderr=stream, check=False)
        rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "parity/k3_kl" in row]
        worst = {m: (min if "agreement" in m else max)(row.get(m, 0.0) for row in rows) for m in MEASURES}
        said = [line.split("parity gate: ", 1)[1] for line in log.read_text().splitlines() if "parity gate: " in line]
        results[name] = worst | {"reported": bool(said), "message": said[0] if said else ""}
    (folder / "controls.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    BREAKAGES[sys.argv[1]]()
    sys.exit(train_rl(["controls.py", *sys.argv[2:]]))
