"""What every benchmark needs: a model from the real flags, fair turns, medians and a record."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import RLConfig, read_config
from megatron_rl.metrics.rundir import git_commit, package_versions
from megatron_rl.metrics.table import format_table
from megatron_rl.parallel import ParallelGroups, initialize, seed_everything, shut_down
from megatron_rl.platform import Platform, current_platform
from megatron_rl.types import Request, SamplingParams, SourcedTask, Task

Round = Mapping[str, float]
"""What each contender reached in one round, in tokens per CPU second."""


@dataclass(frozen=True)
class Shape:
    """``64x3`` is hidden size 64 and 3 layers; the rest follows the quickstart's proportions."""

    hidden: int
    layers: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``128x4`` -> Shape(128, 4)."""
        hidden, _, layers = text.partition("x")
        return cls(int(hidden), int(layers))

    def __str__(self) -> str:
        return f"{self.hidden}x{self.layers}"

    @property
    def heads(self) -> int:
        """4 heads, more where they would be wider than 64."""
        return max(4, self.hidden // 64)

    def flags(self) -> list[str]:
        """Of the training command."""
        sizes = decoder_flags(self.hidden, 3 * self.hidden, self.layers, self.heads, self.heads // 2)
        return [*sizes, f"--init-method-std={self.hidden**-0.5}", "--embedding-init-method-std=0.5"]


def decoder_flags(hidden: int, ffn: int, layers: int, heads: int, groups: int, *, tied: bool = False) -> list[str]:
    """A Qwen2-like model: grouped queries, biased QKV, SwiGLU, RMSNorm; ``tied`` embedding and head."""
    switches = ["group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias"]
    switches += [] if tied else ["untie-embeddings-and-output-weights"]
    return [f"--num-layers={layers}", f"--hidden-size={hidden}", f"--ffn-hidden-size={ffn}",
            f"--num-attention-heads={heads}", f"--num-query-groups={groups}", "--norm-epsilon=1e-6",
            "--make-vocab-size-divisible-by=16", *(f"--{name}" for name in switches)]  # fmt: skip


def benchmark_config(shape: Any, seq_length: int, *extra: str) -> RLConfig:
    """The flags of an RL run on this shape, `Shape` or ``on_gpu``'s; files it would read are never opened."""
    files = [f"--{name}=unused" for name in ("tokenizer-model", "langrl-env-config", "run-dir")]
    run = ["--perform-rl-step", f"--seq-length={seq_length}", "--train-iters=1000", "--lr=1e-4"]
    if not any(flag.startswith("--grpo-group-size") for flag in extra):
        run += ["--grpo-group-size=8", "--grpo-prompts-per-step=8"]
    config, problems = read_config([*shape.flags(), *files, *run, *extra], 1)
    if problems:
        raise SystemExit("\n".join(map(str, problems)))
    return config


def prepare() -> None:
    """CPU seconds of one thread: comparable between contenders, and on a machine that others use too."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # deprecations inside torch and megatron would drown the table


@contextlib.contextmanager
def one_rank(seed: int = 1) -> Iterator[tuple[Platform, ParallelGroups]]:
    """The platform and the groups of a job of one rank, one thread each; what it makes is gone afterwards."""
    prepare()
    platform = current_platform()
    groups = initialize(benchmark_config(Shape(64, 1), 16).parallel, platform)
    try:
        seed_everything(seed)
        yield platform, groups
    finally:
        shut_down()


def command_line(module: str, *, shape: Shape, vocab: int, rounds: int = 5) -> argparse.ArgumentParser:
    """What every benchmark is asked, with its own defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.benchmark.{module}")
    parser.add_argument("--shape", type=Shape.parse, default=shape, help="hidden size x layers: 64x3")
    parser.add_argument("--vocab", type=int, default=vocab)
    parser.add_argument("--rounds", type=int, default=rounds, help="in each of which every contender has a turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser


def record_of(module: str, arguments: argparse.Namespace, **found: Any) -> dict[str, Any]:
    """What was found, the settings it was found with, and `provenance`."""
    settings = {name: asdict(value) if isinstance(value, Shape) else value for name, value in vars(arguments).items()}
    settings = {name: value for name, value in settings.items() if not isinstance(value, Path)}
    return {**found, "settings": settings, **provenance(module)}


def speed_table(record: Mapping[str, Any], what: str, first: str, unit: str = "tokens") -> str:
    """A line a contender: its speed, the extremes, and how many times as fast ``first`` is."""
    rows = [
        [name, round(speed), "{:.0f} .. {:.0f}".format(*record["spread"][name]), record["ratio"].get(f"{first}/{name}")]
        for name, speed in record[f"{unit}_per_cpu_second"].items()
    ]
    return format_table([what, f"{unit} / CPU s", "spread", f"{first} / it"], rows)


def turn_order(names: Sequence[str], round_index: int) -> list[str]:
    """Who goes when: the list rotates, so that nobody always runs on a cold or a warm cache."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]


def compete(contenders: Mapping[str, Callable[[int], int]], rounds: int, turn_seconds: float = 0.5) -> list[Round]:
    """Every contender has a turn a round, after one untimed run each.

    A contender takes a seed and returns how many useful tokens it made.
    """
    for contender in contenders.values():
        contender(0)
    results: list[Round] = []
    for index in range(rounds):
        speeds = {}
        for name in turn_order(list(contenders), index):
            gc.collect()  # one contender's garbage must not be paid for by the next
            speeds[name] = _turn(contenders[name], index + 1, turn_seconds)
        results.append(speeds)
    return results


def _turn(contender: Callable[[int], int], seed: int, at_least: float) -> float:
    """Tokens per CPU second over as many runs as fill ``at_least`` seconds: one may take only 50 ms."""
    tokens, started = 0, time.process_time()
    while True:
        tokens += contender(seed)
        seconds = time.process_time() - started
        if seconds >= at_least:
            return tokens / seconds


def summarise(rounds: Sequence[Round], first: str, unit: str = "tokens") -> dict[str, Any]:
    """Medians, extremes, and the speed of ``first`` relative to each other contender.

    A ratio is the median of the rounds' own ratios: what slows a whole round cancels out.
    """
    names = list(rounds[0])
    columns = {name: [speeds[name] for speeds in rounds] for name in names}
    ratios = {
        f"{first}/{other}": [speeds[first] / speeds[other] for speeds in rounds]
        for other in names
        if first in names and other != first
    }
    return {
        f"{unit}_per_cpu_second": {name: statistics.median(values) for name, values in columns.items()},
        "spread": {name: [min(values), max(values)] for name, values in columns.items()},
        "ratio": {pair: statistics.median(values) for pair, values in ratios.items()},
        "ratio_spread": {pair: [min(values), max(values)] for pair, values in ratios.items()},
        "rounds": list(rounds),
    }


def provenance(module: str) -> dict[str, Any]:
    """How to get a figure again: command, commit, hardware, versions, date."""
    return {
        "command": shlex.join(["python", "-m", f"tools.benchmark.{module}", *sys.argv[1:]]),
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": package_versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def hardware() -> str:
    """Processor, cores, vector instructions and GPU; no host name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines()
                 if line.startswith("model name")]  # fmt: skip
        model = names[0] if names else model
    # What torch's CPU kernels may use: AVX2, say, and whether there are 8-bit and matrix instructions.
    present = {"VNNI": torch.cpu._is_vnni_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    instructions = [name if there else f"no {name}" for name, there in present.items()]
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join(
        [model, f"{os.cpu_count()} cores", torch.backends.cpu.get_cpu_capability(), *instructions, *gpu]
    )


def write_record(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write the record as JSON, if a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")


def requests_of(prompts: Sequence[tuple[int, ...]], copies: int, sampling: SamplingParams) -> list[Request]:
    """One a prompt, ``copies`` samples each."""
    return [
        Request(SourcedTask("benchmark", Task(str(index), "")), prompt, copies, sampling, index)
        for index, prompt in enumerate(prompts)
    ]


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """``count`` prompts of ``length`` random ids."""
    generator = random.Random(seed)
    return [tuple(generator.randrange(vocab_size) for _ in range(length)) for _ in range(count)]
