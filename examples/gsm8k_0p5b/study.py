#!/usr/bin/env python
"""Do 8-bit rollouts learn like bf16 ones? A 0.5B on GSM8K, GRPO in five ways and two seeds, on one GPU.

    python examples/gsm8k_0p5b/study.py --model FILE.gguf --data DIR [--seconds 480] [--at-once 5] [FLAGS OF TRAIN]
    python examples/gsm8k_0p5b/study.py --table                            the results so far, at any time

The whole test split is evaluated first, then the runs begin in the order of `ARMS`, --at-once beside each other, and
each ends with the whole split. After --seconds no run begins, and those under way stop after their step. The same
command later skips what has ended. --quick: tiny steps, to see on a CPU that everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "examples/gsm8k_0p5b/grpo.yaml"
SCORE, GAP = "val/gsm8k/greedy", "training/rollout_logprob_gap_mean"
COSTS = {"s/step": "timing_s/step", "tokens/s": "perf/rollout_tokens_per_s", "peak GB": "perf/max_memory_allocated_gb"}
GRACE = 120
"""Seconds for a run to stop after its step and save."""


@dataclass(frozen=True)
class Size:
    """How much is trained and evaluated; by default as slime publishes it for Qwen2.5-0.5B-Instruct."""

    prompts: int = 20
    group: int = 8
    steps: int = 100
    eval_interval: int = 20
    held_out: int = 256
    whole: int = 1319
    flags: str = ""


QUICK = Size(2, 4, 2, 1, 2, 4, "--no-bf16 --seq-length 512 --rl-max-new-tokens 16 --lr-warmup-iters 0")


@dataclass(frozen=True)
class Arm:
    """One GRPO run."""

    rollouts: str
    """Recipe of the rollouts' weights; none: as they are trained."""
    correction: str
    seed: int

    @property
    def name(self) -> str:
        """The run's directory."""
        return f"{'bf16' if self.rollouts == 'none' else self.rollouts}-{self.correction}-seed{self.seed}"

    def flags(self, size: Size, at_once: int) -> list[str]:
        """Flags of the run; all are evaluated in the dtype that is trained, so that learning alone is compared."""
        cap = ("--rl-correction-cap", "2") if self.correction == "token_tis" else ()
        words = (
            f"--grpo-prompts-per-step {size.prompts} --grpo-group-size {size.group} "
            f"--global-batch-size {size.prompts * size.group} --train-iters {size.steps} --save-interval {size.steps} "
            f"--no-save-optim --eval-interval {size.eval_interval} --rl-prompts-per-eval {size.held_out} "
            f"--rl-rollout-memory-fraction {0.9 / at_once:.3g} --rl-rollout-quantization {self.rollouts} "
            f"--rl-correction {self.correction} --rl-evaluate-unquantized --seed {self.seed}"
        )
        return [*words.split(), *cap, *size.flags.split()]


_PAIRS = (("none", "none"), ("int8", "none"), ("int8", "token_tis"), ("fp8", "token_tis"), ("fp8", "none"))
ARMS = tuple(Arm(*pair, seed) for seed in (1, 2) for pair in _PAIRS)
"""In the order of their value."""


class Study:
    """Starts the runs of one directory, and stops them."""

    def __init__(self, options: argparse.Namespace, size: Size, further: list[str]) -> None:
        self._options, self._size = options, size
        self._further = further
        self._end = time.monotonic() + options.seconds
        self.failed: list[str] = []
        options.run_dir.mkdir(parents=True, exist_ok=True)
        for name, count in (("held_out", size.held_out), ("whole", size.whole)):
            files = {"path": "train.jsonl", "test_path": "test.jsonl"}
            files = {key: str(Path(options.data).resolve() / file) for key, file in files.items()}
            entry = {"environment": "gsm8k", "eval_prompts": count, "eval_samples": 1}
            entry["args"] = {"strict": options.form == "strict", **files}
            self._list(name).write_text(yaml.safe_dump([entry]))

    def _list(self, name: str) -> Path:
        return self._options.run_dir / f"{name}.yaml"

    def before(self) -> None:
        """Evaluate the whole test split before training."""
        self.launch("before", ["--load-hf", self._options.model, *self._whole()])

    def run(self, arm: Arm) -> None:
        """Train, then evaluate the whole test split; print the table of all runs."""
        options = self._options
        if time.monotonic() > self._end:
            return
        flags = ["--load-hf", options.model, "--langrl-env-config", str(self._list("held_out"))]
        if self.launch(arm.name, [*flags, *arm.flags(self._size, options.at_once)]):
            weights = ["--load", str(options.run_dir / arm.name / "checkpoints")]
            model = ["--hf-config", options.model, "--tokenizer-model", options.model]
            self.launch(f"{arm.name}.whole", [*model, *weights, *self._whole()])
        print(table(options.run_dir), flush=True)

    def _whole(self) -> list[str]:
        return ["--eval-only", "--langrl-env-config", str(self._list("whole")), *self._size.flags.split()]

    def flags(self, name: str, flags: list[str]) -> list[str]:
        """Return all flags of a command; the last of two equal ones counts."""
        return ["--config", RECIPE, *flags, *self._further, "--run-dir", str(self._options.run_dir / name)]

    def launch(self, name: str, flags: list[str]) -> bool:
        """Start one process and wait for it; return whether it has finished, now or before."""
        folder = self._options.run_dir / name
        if status(folder) in ("finished", "stopped"):
            return status(folder) == "finished"
        if time.monotonic() > self._end:
            return False
        print(f"{folder} ...", flush=True)
        command = [sys.executable, "train_rl.py", *self.flags(name, flags)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        log = folder.with_suffix(".log")
        with log.open("w") as stream:  # in a session of its own: Ctrl-C reaches this process, which stops the run once
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, cwd=ROOT, env=environment, start_new_session=True
            )
            while process.poll() is None and time.monotonic() < self._end:
                time.sleep(0.2)
            if process.poll() is None:
                process.terminate()
                _wait(process)
        if process.returncode not in (0, 3) and time.monotonic() < self._end:
            self.failed.append(name)
            print(f"{folder} failed with exit code {process.returncode}:\n{_tail(log)}", flush=True)
        return status(folder) == "finished"

    def stop(self) -> None:
        """Let nothing begin any more, and what runs end."""
        self._end = 0.0


def _wait(process: subprocess.Popen) -> None:
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def status(folder: Path) -> str:
    """Return how a run ended, "" if it has not."""
    path = folder / "summary.json"
    return json.loads(path.read_text())["status"] if path.exists() else ""


def table(run_dir: Path) -> str:
    """Return held-out accuracy and mismatch by step, and the costs, of every run there is."""
    whole = _scores(run_dir / "before")
    lines = [f"whole test split before training: {_number(whole.get(0))}"]
    begun = [arm.name for arm in ARMS if (run_dir / arm.name / "metrics.jsonl").exists()]
    found = {name: list(read_rows(run_dir / name / "metrics.jsonl")) for name in begun}
    steps = sorted({row["step"] for rows in found.values() for row in rows if SCORE in row})
    spans = list(zip(steps, steps[1:], strict=False))
    headers = ("run", "ended", "step", *(f"at {step}" for step in steps), "whole", *COSTS)
    results, gaps = [], []
    for name, rows in found.items():
        scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}
        after = list(_scores(run_dir / f"{name}.whole").values())[-1:]
        costs = [[row[key] for row in rows if key in row] for key in COSTS.values()]
        middle = [f"{statistics.median(values):.3g}" if values else "-" for values in costs]
        results.append(
            (name, status(run_dir / name) or "-", str(max((row["step"] for row in rows), default=0)),
             *(_number(scores.get(step)) for step in steps), _number(*after), *middle)
        )  # fmt: skip
        parts = [[row[GAP] for row in rows if GAP in row and first < row["step"] <= last] for first, last in spans]
        gaps.append((name, *(f"{statistics.fmean(part):.2e}" if part else "-" for part in parts)))
    if found:
        lines += ["", "held-out accuracy (greedy) by step; medians of the costs", format_table(headers, results)]
        lines += ["", "mismatch: mean |log-prob difference| of rollouts and trainer, by steps"]
        lines += [format_table(("run", *(f"{first + 1} to {last}" for first, last in spans)), gaps)]
    return "\n".join(lines)


def _scores(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    return {row["step"]: row[SCORE] for row in read_rows(path) if SCORE in row} if path.exists() else {}


def _number(score: float | None = None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def parse(words: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the flags that every command gets besides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="as --load-hf")
    parser.add_argument("--data", help="a directory with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--form", choices=("last", "strict"), default="last", help="strict: a number needs ####")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], metavar="ARM", help="default: all")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "gsm8k_0p5b" / "study")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    options, further = parser.parse_known_args(words)
    options.run_dir = options.run_dir.resolve()
    if Path(options.model).exists():
        options.model = str(Path(options.model).resolve())
    if options.at_once < 1:
        parser.error(f"--at-once {options.at_once}: at least 1")
    missing = [name for name in ("train.jsonl", "test.jsonl") if not (Path(options.data or "") / name).is_file()]
    if missing and not options.table:
        parser.error(f"--data needs a directory with train.jsonl and test.jsonl, got {options.data!r}")
    return options, further


def main() -> int:
    """Run the study; 1 if a run failed."""
    options, further = parse()
    if options.table:
        print(table(options.run_dir))
        return 0
    study = Study(options, QUICK if options.quick else Size(), further)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    arms = [arm for arm in ARMS if options.arms is None or arm.name in options.arms]
    with ThreadPoolExecutor(options.at_once) as pool:
        try:
            pool.submit(study.before).result()
            list(pool.map(study.run, arms))
        except KeyboardInterrupt:
            print("stopping: the runs under way end after their step", flush=True)
            study.stop()
    print(f"run directory: {options.run_dir}")
    return 1 if study.failed else 0


if __name__ == "__main__":
    sys.exit(main())
