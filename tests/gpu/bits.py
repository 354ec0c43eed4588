"""Which bits repeat on a GPU with --batch-invariant-mode: of operations, of the mismatch, of runs. Five minutes.

    python -m tests.gpu.bits --out DIR                  everything
    python -m tests.gpu.bits --out DIR operations       one part: operations, mismatch or runs

``operations`` computes the first rows of a batch alone and among others, as torch comes and with cuBLAS without
split-K, each in a process of its own. ``mismatch`` trains a random model on steps of 4, 32 and 256 completions, whose
log-probs must be the trainer's to the bit. ``runs`` compares two runs, and one that stops and resumes. DIR gets
``bits.json`` and a log a run. The exit code counts what should repeat and does not. Without a CUDA device it rehearses
on small shapes, where the mode has no effect and the mismatch need not be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.platform.cuda import environment_for
from tests.gpu import runs

FAMILY = "qwen3"
MODE = ("--bf16", "--batch-invariant-mode", "--enable-cuda-graph")
COUNTS = (4, 32, 256) if torch.cuda.is_available() else (4, 8)
"""Completions of a step."""
STEPS = 4
LIMIT = 120.0 if torch.cuda.is_available() else 900.0
"""Seconds of a run."""
UNEQUAL = ("timing", "perf/", "memory", "time", "environment/")
"""Beginnings of the columns of ``metrics.jsonl`` that a clock or the machine decides."""
Work = Callable[[torch.Tensor], torch.Tensor]


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--invariant", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "here"))
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.part == "here":
        return Operations(given.invariant).run()
    lines: dict[str, dict[str, str]] = {}
    for name in PARTS if given.part is None else (given.part,):
        print(f"-- {name}", flush=True)
        lines[name] = PARTS[name](out)
        (out / "bits.json").write_text(json.dumps(lines, indent=1))
    failed = [line for part in lines.values() for line in part.values() if line.startswith("FAIL")]
    return len(failed)


# -- operations --------------------------------------------------------------------------------


def operations(out: Path) -> dict[str, str]:
    """Both settings of cuBLAS; only the second one has to repeat its bits."""
    found = {}
    for name, words in (("as torch comes", ()), ("batch-invariant", ("--invariant",))):
        command = [sys.executable, "-m", "tests.gpu.bits", "--out", str(out), "here", *words]
        own = environment() | (environment_for(batch_invariant=True) if words else {})
        ended = subprocess.run(command, cwd=runs.ROOT, env=own, capture_output=True, text=True, check=False)
        print(f"== {name}\n{ended.stdout}", end="", flush=True)
        (out / f"operations {name}.log").write_text(ended.stdout + ended.stderr)
        for line in ended.stdout.splitlines():
            what, _, said = line.partition("|")
            is_wrong = bool(words) and torch.cuda.is_available() and not said.strip().startswith("same bits")
            found[f"{name}: {what.strip()}"] = f"FAIL {said.strip()}" if is_wrong else said.strip()
        if ended.returncode:
            said = (ended.stderr.strip() or "no word").splitlines()[-1]
            found[name] = f"FAIL exit code {ended.returncode}: {said[:200]}"
    return found


class Operations:
    """The first rows of the largest batch against the same rows in smaller ones; a line each."""

    def __init__(self, invariant: bool) -> None:
        from megatron_rl.platform import cuda, current_platform

        self.is_cuda, self.device = torch.cuda.is_available(), current_platform().device
        if invariant and self.is_cuda:
            cuda.forbid_split_k()
        torch.manual_seed(0)
        self.rows = (4, 8, 16, 24, 32, 64, 128, 256, 1000, 4096, 8192) if self.is_cuda else (4, 8, 32)

    def run(self) -> int:
        """Print all lines; an operation that raises is a line as well."""
        self.products()
        self.norms()
        if self.is_cuda:
            self.codes()
            self.logprobs()
        return 0

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def line(self, name: str, judge: Callable[[], str]) -> None:
        try:
            said = judge()
        except Exception as error:  # noqa: BLE001 - the other operations are worth as much
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        print(f"{name:34} | {said}", flush=True)

    def over_rows(self, name: str, work: Work, inputs: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        counts = self.rows if counts is None else counts

        def judge() -> str:
            whole = work(inputs[: counts[-1]])
            bad = [count for count in counts[:-1] if not torch.equal(work(inputs[:count].contiguous()), whole[:count])]
            micros = ", ".join(f"{self.micros(partial(work, inputs[:count])):.0f}" for count in counts[:2])
            return f"{'same bits' if not bad else f'other bits at {bad}'}; {micros} us at {counts[0]}, {counts[1]}"

        self.line(name, judge)

    def micros(self, work: Callable[[], torch.Tensor], repeats: int = 20) -> float:
        work()
        wait = torch.cuda.synchronize if self.is_cuda else lambda: None
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        return 1e6 * (time.perf_counter() - started) / repeats

    def products(self) -> None:
        """The linears of a 0.5B and a 7B, whole and cut over two ranks, and an output layer."""
        linears = {
            "0.5B qkv": (1152, 896), "0.5B proj": (896, 896), "0.5B fc1": (9728, 896), "0.5B fc2": (896, 4864),
            "7B qkv": (4608, 3584), "7B proj": (3584, 3584), "7B fc1": (37888, 3584), "7B fc2": (3584, 18944),
            "7B fc2 of TP 2": (3584, 9472), "0.5B head": (151936, 896),
        } if self.is_cuda else {"small": (96, 64)}  # fmt: skip
        for name, (outputs, depth) in linears.items():
            weight = self.random(outputs, depth) * depth**-0.5
            counts = self.rows if outputs < 100_000 else self.rows[:8]
            inputs = self.random(counts[-1], depth)
            self.over_rows(f"GEMM {name}", lambda x, weight=weight: torch.mm(x, weight.t()), inputs, counts)

    def norms(self) -> None:
        """torch's, and on a GPU the kernels of rollouts between GEMMs."""
        hidden = 3584 if self.is_cuda else 64
        gain, inputs = torch.rand(hidden, device=self.device).bfloat16(), self.random(self.rows[-1], hidden)
        self.over_rows("torch rms_norm", lambda x: torch.nn.functional.rms_norm(x, (hidden,), gain, 1e-6), inputs)
        if self.is_cuda:
            from megatron_rl.models.kernels import add_norm, gate_up

            self.over_rows("add_norm", lambda x: add_norm(x.clone(), None, None, gain, 1e-6, None)[1], inputs)
            self.over_rows("gate_up", lambda x: gate_up(x, None), inputs)

    def codes(self) -> None:
        """The GEMM of aligned int8 training."""
        from megatron_rl.quantization.kernels import int8_matmul

        weight = torch.randint(-127, 128, (3584, 3584), device=self.device, dtype=torch.int8)
        scales, ones = torch.rand(3584, 1, device=self.device), torch.ones(8192, 1, device=self.device)
        self.over_rows(
            "int8_matmul", lambda x: int8_matmul((20 * x).to(torch.int8), weight, ones[: len(x)], scales),
            self.random(8192, 3584),
        )  # fmt: skip

    def logprobs(self) -> None:
        """The draw's log-prob against the trainer's, of the same logits, in one vocabulary shard and in two."""
        from megatron_rl.algorithms.logprob_kernels import finished, local_statistics
        from megatron_rl.inference.sampling_kernel import draw_by_chunks

        logits, columns = 4 * self.random(64, 151_936), 151_936
        for shards in (1, 2):
            for temperature in (1.0, 0.7):
                def judge(width: int = columns // shards, temperature: float = temperature) -> str:
                    scale = torch.full((64,), temperature, device=self.device)
                    ids, drawn = draw_by_chunks(logits.float(), torch.rand(64, device=self.device), scale, None, width)
                    parts = []
                    for first in range(0, columns, width):
                        own = (ids >= first) & (ids < first + width)
                        part = logits[:, first : first + width].contiguous()
                        targets = torch.where(own, ids - first, 0)
                        parts.append(local_statistics(part, targets, own, width, temperature, False))
                    scored = finished(torch.stack(parts), temperature, False)[0]
                    return "same bits" if torch.equal(drawn, scored) else f"off by {(drawn - scored).abs().max():.1e}"

                self.line(f"draw = score, {shards} shards, T {temperature}", judge)


# -- runs --------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Of a process that imports this checkout."""
    path = os.pathsep.join(filter(None, (str(runs.ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def train(out: Path, name: str, completions: int, *flags: str) -> tuple[Path, str | None]:
    """Train for `STEPS` steps of so many completions; the run directory, and what went wrong."""
    if not (out / FAMILY).exists():
        runs.write_model(out / FAMILY, FAMILY)
        runs.write_tasks(out)
    command = [
        sys.executable, "train_rl.py", "--perform-rl-step", f"--load-hf={out / FAMILY}", f"--run-dir={out / name}",
        f"--langrl-env-config={out / 'environments.yaml'}", f"--train-iters={STEPS}", "--grpo-group-size=4",
        f"--grpo-prompts-per-step={completions // 4}", f"--global-batch-size={max(4, completions // 2)}",
        "--seq-length=128", "--micro-batch-size=4", "--lr=1e-4", "--rl-max-new-tokens=24", "--rl-temperature=0.7",
        f"--save-interval={STEPS // 2}", *MODE, *flags,
    ]  # fmt: skip
    try:
        ended = subprocess.run(
            command, cwd=runs.ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return out / name, f"still running after {LIMIT:.0f} s"
    with (out / f"{name}.log").open("a") as log:
        log.write(ended.stdout + ended.stderr)
    errors = [line for line in ended.stderr.splitlines() if " ERROR " in line or "Error: " in line]
    return out / name, (errors or [f"exit code {ended.returncode}"])[0][:200] if ended.returncode else None


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every step, but for those of clocks and of the machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(UNEQUAL)} for row in rows]


def say(name: str, line: str) -> str:
    """Print a line as soon as it is known."""
    print(f"{name:34} | {line}", flush=True)
    return line


def mismatch(out: Path) -> dict[str, str]:
    """The largest difference of log-probs between rollouts and trainer, at each number of completions."""
    found = {}
    for completions in COUNTS:
        name = f"{completions} completions"
        run_dir, fault = train(out, f"mismatch {completions}", completions)
        if fault is None:
            gaps = [row.get("training/rollout_logprob_gap_max", 0.0) for row in rows_of(run_dir)]
            is_wrong = torch.cuda.is_available() and max(gaps) != 0
            fault = f"{'FAIL ' if is_wrong else ''}largest mismatch {max(gaps):.1e} in {len(gaps)} steps"
        else:
            fault = f"FAIL {fault}"
        found[name] = say(name, fault)
    return found


def repeated(out: Path) -> dict[str, str]:
    """A run against the same run once more, and against one that ends after half of its steps and goes on."""
    first, fault = train(out, "first", COUNTS[1])
    if fault is not None:
        return {"first": say("first", f"FAIL {fault}")}
    found, expected = {}, rows_of(first)
    for name, launches in (("second", [()]), ("resumed", [(f"--exit-interval={STEPS // 2}",), ("--resume",)])):
        for flags in launches:
            run_dir, fault = train(out, name, COUNTS[1], *flags)
            if fault is not None:
                break
        found[name] = say(name, compared(expected, rows_of(run_dir)) if fault is None else f"FAIL {fault}")
    return found


def compared(expected: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Return the first difference of two runs' metrics, which have all digits."""
    if len(rows) != len(expected):
        return f"FAIL {len(rows)} rows instead of {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, rows, strict=True), 1):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            values = f"{one.get(names[0])} and {other.get(names[0])}"
            return f"FAIL step {number}: {len(names)} metrics differ, {names[0]} is {values}"
    return f"same bits in {len(rows)} steps"


PARTS: dict[str, Callable[[Path], dict[str, str]]] = {
    "operations": operations, "mismatch": mismatch, "runs": repeated,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
