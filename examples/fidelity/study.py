#!/usr/bin/env python
"""Train recipe x correction x seed and put the results side by side. See run.sh."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from controls import MEASURES, run_all
from plot import write_page
from settings import SETTINGS, Setting, quick

from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[2]
GAP, REWARD = "training/rollout_logprob_gap_mean", "critic/rewards/mean"
CORRECTION = {"weight": "rollout_corr/rollout_is_mean", "effective": "rollout_corr/rollout_is_eff_sample_size",
              "capped": "rollout_corr/rollout_is_clipped", "left": "rollout_corr/residual_gap"}  # fmt: skip
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for an interval of 95 % over 2 to 10 seeds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed and a few steps, to see that everything runs")
    parser.add_argument("--seeds", default=None, help="default: 1 2 3")
    parser.add_argument("--settings", default="easy hard", help="some of easy, hard, seeds, experts and partial")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "fidelity")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one process each")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in (arguments.seeds or ("1" if arguments.quick else "1 2 3")).split()]
    unknown = set(arguments.settings.split()) - set(SETTINGS)
    if unknown:
        parser.error(f"--settings {' '.join(sorted(unknown))}: there are {', '.join(SETTINGS)}")
    for name in arguments.settings.split():
        setting = quick(SETTINGS[name]) if arguments.quick else SETTINGS[name]
        study(setting, seeds, arguments.run_dir, arguments.jobs)
        if name == "easy":
            controls(setting, seeds[0], arguments.run_dir)
    write_page(arguments.run_dir)
    print(f"\nrun directory: {arguments.run_dir}\nopen in a browser: {arguments.run_dir / 'fidelity.html'}")
    return 0


def study(setting: Setting, seeds: list[int], run_dir: Path, jobs: int) -> None:
    """All runs of one setting, then its table and JSON file."""
    folder = run_dir / setting.name
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: warm_start(setting, seed, folder), seeds))
        runs = [(recipe, correction, seed) for seed in seeds for recipe, correction in setting.pairs]
        list(pool.map(lambda run: grpo(setting, *run, folder), runs))
    results = collect(setting, seeds, folder)
    path = run_dir / ("summary.json" if setting.name == "easy" else f"{setting.name}.json")
    path.write_text(json.dumps(results, indent=1) + "\n")
    print_table(setting, results)


def controls(setting: Setting, seed: int, run_dir: Path) -> None:
    """Broken on purpose: the gate must tell."""
    warm_start = run_dir / setting.name / f"seed_{seed}" / "warm_start"
    results = run_all(run_dir, setting.grpo("int8", "token_tis"), warm_start)
    rows = [
        (name, *(f"{found[measure]:.2g}" for measure in MEASURES), "reported" if found["reported"] else "-")
        for name, found in results.items()
    ]
    print("\nbroken on purpose (int8, worst of the first steps)")
    print(format_table(("", *(m.split("/")[1] for m in MEASURES), "gate"), rows))


def run_path(folder: Path, seed: int, recipe: str, correction: str) -> Path:
    """Where one run lies."""
    return folder / f"seed_{seed}" / f"{recipe}-{correction}"


def warm_start(setting: Setting, seed: int, folder: Path) -> None:
    """Tokenizer, environments and the supervised start that all runs of the seed share."""
    base = folder / f"seed_{seed}"
    base.mkdir(parents=True, exist_ok=True)
    runpy.run_path(str(ROOT / "examples/quickstart/make_tokenizer.py"))["main"](base / "tokenizer")
    entry = {"environment": "arithmetic", "weight": 1.0, "args": {**setting.environment, "seed": seed}}
    (base / "environments.yaml").write_text(yaml.safe_dump([entry]))
    launch(setting.warm_start(), base, seed, base / "warm_start")


def grpo(setting: Setting, recipe: str, correction: str, seed: int, folder: Path) -> None:
    """One GRPO run from the seed's warm start."""
    base = folder / f"seed_{seed}"
    start = ["--pretrained-checkpoint", str(base / "warm_start" / "checkpoints")]
    launch([*setting.grpo(recipe, correction), *start], base, seed, run_path(folder, seed, recipe, correction))


def launch(flags: list[str], base: Path, seed: int, run_dir: Path) -> None:
    """One process of train_rl.py, unless the run is there already; its output goes to a log beside it."""
    if json_of(run_dir / "summary.json").get("status") == "finished":
        return
    print(f"{run_dir} ...", flush=True)
    common = ["--tokenizer-model", base / "tokenizer", "--langrl-env-config", base / "environments.yaml"]
    command = [sys.executable, ROOT / "train_rl.py", *flags, *common, "--seed", seed, "--run-dir", run_dir, "--resume"]
    log = run_dir.with_suffix(".log")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w") as stream:
        code = subprocess.call([str(part) for part in command], stdout=stream, stderr=stream, cwd=ROOT, env=environment)
    if code:
        raise SystemExit(f"{run_dir} failed with exit code {code}:\n{tail(log)}")


def collect(setting: Setting, seeds: list[int], folder: Path) -> dict[str, dict[str, dict]]:
    """``{recipe: {correction: {"pass@1": [one a seed], "gap_mean": .., "gap_max": ..}}}``."""
    results: dict[str, dict[str, dict]] = {}
    for recipe, correction in setting.pairs:
        paths = [run_path(folder, seed, recipe, correction) for seed in seeds]
        summaries = [json_of(path / "summary.json") for path in paths]
        runs = [[row for row in read_rows(path / "metrics.jsonl") if GAP in row] for path in paths]
        steps = [row for run in runs for row in run]
        results.setdefault(recipe, {})[correction] = {
            "pass@1": [summary["eval"]["after"]["pass@1"] for summary in summaries],
            "pass@1_before": [summary["eval"]["before"]["pass@1"] for summary in summaries],
            "reward": [statistics.fmean(row[REWARD] for row in run) for run in runs],
            "reward_last": [statistics.fmean(row[REWARD] for row in run[-len(run) // 4 :]) for run in runs],
            **{name: _mean(row.get(metric) for row in steps) for name, metric in CORRECTION.items()},
            "gap_mean": statistics.fmean(row[GAP] for row in steps),
            "gap_max": max(summary["logprob_gap_max"] for summary in summaries),
            "k3_kl": statistics.fmean(row["rollout_corr/k3_kl"] for row in steps),
            "seconds": statistics.fmean(summary["seconds"]["run"] for summary in summaries),
        }
    return results


def print_table(setting: Setting, results: dict[str, dict[str, dict]]) -> None:
    """One row a pair, and the noise between seeds that the differences are to be read against."""
    reference = results["none"]["none"]["pass@1"]
    rows = []
    for recipe, corrections in results.items():
        for correction, found in corrections.items():
            scores = found["pass@1"]
            difference = statistics.fmean(a - b for a, b in zip(scores, reference, strict=True))
            rows.append(
                (recipe, correction, " ".join(f"{score:.3f}" for score in scores), f"{statistics.fmean(scores):.3f}",
                 f"{difference:+.3f}", f"{found['gap_mean']:.1e}", f"{found['gap_max']:.1e}", f"{found['k3_kl']:.1e}")
            )  # fmt: skip
    headers = ("rollouts", "correction", "pass@1 by seed", "mean", "to none", "gap mean", "gap max", "k3 KL")
    print(f"\n{setting.name}: held-out pass@1 after {setting.steps} steps of {setting.updates_per_step} updates")
    print(format_table(headers, rows))
    if 1 < len(reference) <= len(T_95) + 1:
        print_differences(results)
        print(f"seed noise: the unquantised runs' standard deviation is {statistics.stdev(reference):.3f}")


def print_differences(results: dict[str, dict[str, dict]]) -> None:
    """Differences to the unquantised run of the same seed, and of each correction to none, with 95 % intervals."""
    reference, rows = results["none"]["none"], []
    for recipe, corrections in results.items():
        for correction, found in corrections.items():
            others = [("none, none", reference)] if found is not reference else []
            if correction != "none" and "none" in corrections:
                others.append((f"{recipe}, none", corrections["none"]))
            for name, other in others:
                cells = (difference(found[measure], other[measure]) for measure in ("pass@1", "reward_last", "reward"))
                rows.append((f"{recipe}, {correction}", name, *cells))
    print(format_table(("run", "minus", "pass@1", "training reward, last quarter", "all steps"), rows))


def difference(values: list[float], others: list[float]) -> str:
    """Mean of the paired differences of the seeds and half its 95 % interval, ``+0.012 ± 0.020``."""
    pairs = [a - b for a, b in zip(values, others, strict=True)]
    half = T_95[len(pairs) - 2] * statistics.stdev(pairs) / len(pairs) ** 0.5
    return f"{statistics.fmean(pairs):+.3f} ± {half:.3f}"


def _mean(values: Iterable[float | None]) -> float | None:
    """None where nothing is corrected."""
    kept = [value for value in values if value is not None]
    return statistics.fmean(kept) if kept else None


def json_of(path: Path) -> dict:
    """Empty where there is no file yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
