"""What to run on a GPU nobody has run this on, in calls of under ten minutes each.

    python -m tools.benchmark.gpu_calls correctness --out DIR     smoke checks, then every file of tests/gpu
    python -m tools.benchmark.gpu_calls numbers --out DIR         attention, products, re-quantisation, decoding of a 7B
    python -m tools.benchmark.gpu_calls training --out DIR        a 0.5B: decoding, GRPO, updates; the quickstart
    python -m tools.benchmark.gpu_calls large --out DIR           a 32B, and attention in an engine

Every step is a process of its own with a time limit; a step that fails or hangs costs its limit and no more. DIR gets
CALL.log with all that the steps said, and a JSON record a benchmark. Triton's compiled kernels are kept in
DIR/triton.tar.gz, from which a later call (--kernels FILE) takes them. Without a CUDA device it rehearses.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from megatron_rl.metrics.console import format_table

ROOT = Path(__file__).parents[2]
SECONDS = 560.0
"""Of a whole call; a machine may end it at ten minutes and keep nothing."""
LEAST = 20.0
"""With less left no step is begun."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
"""One GPU: ranks talk over the loopback interface. What the user has set counts."""


class Step(NamedTuple):
    """One process."""

    name: str
    command: tuple[str, ...]  # behind the interpreter, or a whole one without ``-m``; ``{out}`` is the folder
    limit: float  # seconds


def _tests(name: str) -> Step:
    return Step(f"tests/gpu/{name}", ("-m", "pytest", f"tests/gpu/test_gpu_{name}.py"), 150)


def _gpu(section: str, limit: float) -> Step:
    """A section of the GPU benchmark; it leaves what it has when its time is over."""
    command = ("-m", "tools.benchmark.gpu", section, f"--seconds={limit - 30:.0f}")
    return Step(f"gpu {section}", (*command, f"--json={{out}}/gpu_{section}.json"), limit)


CALLS: dict[str, tuple[Step, ...]] = {
    "correctness": (
        Step("smoke", ("-m", "tests.gpu.smoke"), 150),
        *map(_tests, ("graphs", "quantization_kernels", "rollout_kernels", "expert_kernels", "quantization")),
        *map(_tests, ("attention", "sampler", "state_kernels", "logprobs", "engine", "memory")),
        *map(_tests, ("checkpoint", "primitives")),
    ),
    "numbers": (
        _gpu("decode_attention", 75),
        _gpu("products", 80),
        _gpu("activations", 50),
        _gpu("requantise", 75),
        _gpu("decode_7B", 240),
    ),
    "training": (
        _gpu("decode_0.5B", 95),
        _gpu("grpo", 75),
        _gpu("training", 65),
        _gpu("prefill", 65),
        Step("quickstart", ("bash", "examples/quickstart/run.sh", "--run-dir", "{runs}/quickstart"), 200),
    ),
    "large": (_gpu("decode_32B", 220), _gpu("attention", 150)),
}


class Ended(NamedTuple):
    """What became of a step."""

    step: Step
    verdict: str  # ``ok``, ``FAIL``, ``out of time`` or ``not begun``
    seconds: float
    said: str  # its last line


def run_call(steps: Sequence[Step], log: Path, until: float, places: Mapping[str, str]) -> Iterator[Ended]:
    """The steps one after the other, until `time.monotonic` says ``until``."""
    with log.open("w") as file:
        for step in steps:
            left = until - time.monotonic()
            if left >= LEAST:
                yield _run(step, min(step.limit, left), log, file, places)
            else:
                yield Ended(step, "not begun", 0.0, "no time was left")


def _run(step: Step, limit: float, log: Path, file: TextIO, places: Mapping[str, str]) -> Ended:
    command = [part.format(**places) for part in step.command]
    command = [sys.executable, *command] if command[0] == "-m" else command
    file.write(f"\n===== {step.name}: {' '.join(command)}\n")
    file.flush()
    begin, started = log.stat().st_size, time.monotonic()
    environment = ENVIRONMENT | {"PYTHON": sys.executable} | os.environ
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        verdict = "ok" if process.wait(limit) == 0 else "FAIL"
    except subprocess.TimeoutExpired:
        verdict = "out of time"
    finally:
        _end_group(process)
    with log.open("rb") as written:
        written.seek(begin)
        lines = [line for line in written.read().decode(errors="replace").splitlines() if line.strip()]
    return Ended(step, verdict, time.monotonic() - started, lines[-1].strip()[:100] if lines else "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The step and whatever it left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _kernels() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def take_kernels(archive: Path, into: Path) -> None:
    """Unpack what an earlier call has compiled."""
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")


def keep_kernels(archive: Path, cache: Path) -> None:
    """Pack what was compiled; nothing where nothing was."""
    if cache.is_dir() and any(cache.iterdir()):
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(cache, arcname=".")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: how many steps did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--kernels", type=Path, help="compiled kernels of an earlier call, DIR/triton.tar.gz")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole call")
    parser.add_argument("--only", action="append", help="run the step of this name only; may be repeated")
    arguments = parser.parse_args(argv)
    import torch

    until = time.monotonic() + arguments.seconds
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.kernels is not None and arguments.kernels.is_file():
        take_kernels(arguments.kernels, _kernels())
    steps = [step for step in CALLS[arguments.call] if not arguments.only or step.name in arguments.only]
    if not torch.cuda.is_available():
        print("no CUDA device: a rehearsal, whose figures mean nothing", flush=True)
    places, rows = {"out": str(out), "runs": str(ROOT / "runs")}, []
    for ended in run_call(steps, out / f"{arguments.call}.log", until, places):
        rows.append((ended.verdict, ended.step.name, f"{ended.seconds:.0f}", ended.said))
        print("{}: {}, {} s: {}".format(*rows[-1]), flush=True)
    if torch.cuda.is_available():
        keep_kernels(out / "triton.tar.gz", _kernels())
    print("\n" + format_table(("verdict", "step", "s", "last line"), rows))
    return sum(verdict != "ok" for verdict, *_ in rows)


if __name__ == "__main__":
    sys.exit(main())
