"""What to run on a GPU nobody has run this on, in calls of under ten minutes each.

    python -m tools.benchmark.gpu_calls correctness --out DIR     a probe, smoke checks, tests/gpu, short runs
    python -m tools.benchmark.gpu_calls ranks --out DIR           several ranks on the one GPU over NCCL
    python -m tools.benchmark.gpu_calls bits --out DIR            equal bits in batches, runs and after a stop
    python -m tools.benchmark.gpu_calls numbers --out DIR         attention, products, decoding of a 7B and of experts
    python -m tools.benchmark.gpu_calls training --out DIR        a 0.5B: decoding, GRPO, updates; the quickstart
    python -m tools.benchmark.gpu_calls large --out DIR           a 32B, plain torch beside us, attention in an engine
    python -m tools.benchmark.gpu_calls all --out DIR             all of them: a rehearsal without a CUDA device

Every step is a process of its own with a time limit; a step that fails or hangs costs its limit and no more. Test files
run eight at once, what is measured runs alone. DIR gets a log a step, CALL.STEP.log, and a JSON record a benchmark,
both as they grow. Triton's compiled kernels are kept in DIR/triton.tar.xz, from which a later call (--kernels FILE)
takes them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from megatron_rl.metrics.console import format_table

ROOT = Path(__file__).parents[2]
SECONDS = 560.0
"""Of a whole call; a machine may end it at ten minutes and keep nothing."""
REHEARSAL_PATIENCE = 10.0
"""Times the limits of a GPU: a rehearsal may have few and busy cores."""
LEAST = 20.0
"""With less left no step is begun."""
PAUSE = 0.05
"""Between two looks at the processes."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
"""One GPU: ranks talk over the loopback interface. What the user has set counts."""
AT_ONCE = 8
"""Steps that need not be alone: two cores each of the 16 that such a machine has."""
PRESET = 0
"""Of xz, on the side of speed: a call's time is short."""


class Step(NamedTuple):
    """One process."""

    name: str
    command: tuple[str, ...]  # behind the interpreter, or a whole one without ``-m``; ``{out}`` is the folder
    limit: float  # seconds
    is_alone: bool = True  # on the GPU: what is timed, and what counts memory


def _tests(name: str, *, is_alone: bool = False) -> Step:
    command = ("-m", "pytest", "-rfE", "--durations=5", f"tests/gpu/test_gpu_{name}.py")
    return Step(f"tests/gpu/{name}", command, 200, is_alone)


def _gpu(section: str, limit: float) -> Step:
    """A section of the GPU benchmark; it leaves what it has when its time is over."""
    command = ("-m", "tools.benchmark.gpu", section, f"--seconds={limit - 30:.0f}")
    return Step(f"gpu {section}", (*command, f"--json={{out}}/gpu_{section}.json"), limit)


CALLS: dict[str, tuple[Step, ...]] = {
    "correctness": (
        Step("probe", ("-m", "tests.gpu.probe"), 90),
        Step("smoke", ("-m", "tests.gpu.smoke"), 150),
        # The longest first, so that no long one is begun last.
        *map(_tests, ("attention", "expert_kernels", "rollout_kernels", "quantization", "quantization_kernels")),
        *map(_tests, ("sampler", "engine", "state_kernels", "checkpoint", "primitives", "deterministic")),
        Step("runs", ("-m", "tests.gpu.runs"), 200),
        *(_tests(name, is_alone=True) for name in ("memory", "graphs", "logprobs")),
    ),
    "ranks": (Step("several_ranks", ("-m", "tests.gpu.several_ranks", "--out", "{out}/several_ranks"), 420),),
    "bits": (Step("bits", ("-m", "tests.gpu.bits", "--out", "{out}/bits"), 420),),
    "numbers": (
        _gpu("decode_attention", 75),
        _gpu("products", 80),
        _gpu("decode_7B", 200),
        _gpu("requantise", 75),
        _gpu("decode_30B", 130),
    ),
    "training": (
        _gpu("decode_0.5B", 95),
        _gpu("training", 80),
        _gpu("grpo", 75),
        _gpu("prefill", 65),
        Step("quickstart", ("bash", "examples/quickstart/run.sh", "--run-dir", "{runs}/quickstart"), 200),
    ),
    "large": (_gpu("decode_32B", 220), _gpu("peer", 105), _gpu("attention", 150), _gpu("activations", 50)),
}


class Ended(NamedTuple):
    """What became of a step."""

    step: Step
    verdict: str  # ``ok``, ``FAIL``, ``out of time`` or ``not begun``
    seconds: float
    said: str  # its last line


class Process(Protocol):
    """What is asked of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or None as long as it runs."""
        ...

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


Start = Callable[[Sequence[str], Mapping[str, str], BinaryIO], Process]
"""(command, environment, log) -> the process, at the head of a group of its own."""


def start(command: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> Process:
    """In the project's root."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


@dataclass
class _Running:
    step: Step
    process: Process
    log: Path
    started: float
    end: float
    """As `time.monotonic` tells it."""

    def ended(self) -> Ended | None:
        """What became of it, if it is over; ends one whose time is."""
        code, now = self.process.poll(), time.monotonic()
        if code is None and now < self.end:
            return None
        _end_group(self.process)
        verdict = "out of time" if code is None else "FAIL" if code else "ok"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return Ended(self.step, verdict, now - self.started, lines[-1].strip()[:100] if lines else "")


def run_call(
    steps: Sequence[Step], log: Path, until: float, places: Mapping[str, str], begin: Start = start
) -> Iterator[Ended]:
    """The steps in their order, as many at once as may be, until `time.monotonic` says ``until``.

    ``log`` is CALL.log: each step writes CALL.STEP.log beside it.
    """
    waiting, running = list(steps), list[_Running]()
    try:
        while waiting or running:
            while waiting and _has_room(waiting[0], running):
                step, left = waiting.pop(0), until - time.monotonic()
                if left >= LEAST:
                    running.append(_begin(step, min(step.limit, left), log, places, begin))
                else:
                    yield Ended(step, "not begun", 0.0, "no time was left")
            for one in list(running):
                if (ended := one.ended()) is not None:
                    running.remove(one)
                    yield ended
            time.sleep(PAUSE)
    finally:
        for one in running:
            _end_group(one.process)


def _has_room(step: Step, running: Sequence[_Running]) -> bool:
    if not running:
        return True
    return len(running) < AT_ONCE and not step.is_alone and not any(one.step.is_alone for one in running)


def _begin(step: Step, limit: float, log: Path, places: Mapping[str, str], begin: Start) -> _Running:
    command = [part.format(**places) for part in step.command]
    command = [sys.executable, *command] if command[0] == "-m" else command
    own = log.with_name(f"{log.stem}.{step.name.replace('/', '_').replace(' ', '_')}.log")
    environment = ENVIRONMENT | {"PYTHON": sys.executable} | os.environ
    with own.open("wb") as file:
        file.write(f"===== {step.name}: {' '.join(command)}\n".encode())
        file.flush()
        started = time.monotonic()
        return _Running(step, begin(command, environment, file), own, started, started + limit)


def _end_group(process: Process) -> None:
    """The step and whatever it left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
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
        with tarfile.open(archive, "w:xz", preset=PRESET) as packed:
            packed.add(cache, arcname=".")


def main(argv: Sequence[str] | None = None, begin: Start = start) -> int:
    """The exit code: how many steps did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=[*CALLS, "all"])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--kernels", type=Path, help="compiled kernels of an earlier call, DIR/triton.tar.xz")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a whole call")
    parser.add_argument("--only", action="append", help="run the step of this name only; may be repeated")
    arguments = parser.parse_args(argv)
    import torch

    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.kernels is not None and arguments.kernels.is_file():
        take_kernels(arguments.kernels, _kernels())
    patience = 1.0 if torch.cuda.is_available() else REHEARSAL_PATIENCE
    if not torch.cuda.is_available():
        print("no CUDA device: a rehearsal, whose figures mean nothing", flush=True)
    places, rows = {"out": str(out), "runs": str(ROOT / "runs")}, []
    for call in CALLS if arguments.call == "all" else (arguments.call,):
        until = time.monotonic() + arguments.seconds * patience
        wanted = [step for step in CALLS[call] if not arguments.only or step.name in arguments.only]
        steps = [step._replace(limit=step.limit * patience) for step in wanted]
        for ended in run_call(steps, out / f"{call}.log", until, places, begin):
            rows.append((ended.verdict, ended.step.name, f"{ended.seconds:.0f}", ended.said))
            print("{}: {}, {} s: {}".format(*rows[-1]), flush=True)
        if torch.cuda.is_available():
            keep_kernels(out / "triton.tar.xz", _kernels())
    print("\n" + format_table(("verdict", "step", "s", "last line"), rows))
    return sum(verdict != "ok" for verdict, *_ in rows)


if __name__ == "__main__":
    sys.exit(main())
