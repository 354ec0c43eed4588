"""What every benchmark needs: a model from the real flags, fair turns, medians and a record."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import platform
import random
import re
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import ModelLayout
from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.rundir import git_commit, package_versions
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, seed_everything, shut_down
from megatron_rl.types import Request, SamplingParams, SourcedTask, Task

SPEED = "tokens / CPU s"
LOOP = "--no-moe-grouped-gemm"
Round = Mapping[Any, float]
"""What each contender reached in one round: a speed, or seconds."""


@dataclass(frozen=True)
class Shape:
    """A Qwen2-like decoder: grouped queries, biased QKV, SwiGLU, RMSNorm."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    groups: int
    vocab: int = 0  # 0 where the command line says it
    tied: bool = False  # one matrix for the embedding and the head
    whole_layers: int = 0  # of the model this one was cut from; 0 where nothing was cut

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``64x3`` is hidden size 64 and 3 layers; the rest follows the quickstart's proportions.

        4 heads, more where they would be wider than 64.
        """
        hidden, layers = map(int, text.split("x"))
        heads = max(4, hidden // 64)
        return cls(text, hidden, 3 * hidden, layers, heads, heads // 2)

    def cut(self, layers: int) -> Shape:
        """The same model with fewer layers."""
        return replace(self, layers=layers, whole_layers=self.layers)

    @property
    def whole(self) -> Shape:
        """The model this one was cut from, or itself."""
        return replace(self, layers=self.whole_layers or self.layers, whole_layers=0)

    @functools.cached_property
    def layout(self) -> ModelLayout:
        """Its parameters, linears and cache."""
        return benchmark_config(self, 16).layout(self.vocab)

    @property
    def linear_weights(self) -> int:
        """Numbers in the linears of all layers."""
        return sum(linear.outputs * linear.inputs for linear in self.layout.linears)

    @property
    def head_weights(self) -> int:
        """Numbers in the output head."""
        return self.vocab * self.hidden

    def flags(self) -> list[str]:
        """Of the training command; with the quickstart's spread, random weights have log-probs that differ."""
        sizes = {"num-layers": self.layers, "hidden-size": self.hidden, "ffn-hidden-size": self.ffn,
                 "num-attention-heads": self.heads, "num-query-groups": self.groups, "norm-epsilon": 1e-6,
                 "make-vocab-size-divisible-by": 16}  # fmt: skip
        switches = ["group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias"]
        if not self.tied:
            sizes |= {"init-method-std": self.hidden**-0.5, "embedding-init-method-std": 0.5}
            switches.append("untie-embeddings-and-output-weights")
        return [*(f"--{name}={size}" for name, size in sizes.items()), *(f"--{name}" for name in switches)]


def benchmark_config(shape: Shape, seq_length: int, *extra: str, world_size: int = 1) -> RLConfig:
    """The flags of an RL run on this shape; files it would read are never opened."""
    files = [f"--{name}=unused" for name in ("tokenizer-model", "langrl-env-config", "run-dir")]
    run = ["--perform-rl-step", f"--seq-length={seq_length}", "--train-iters=1000", "--lr=1e-4"]
    if not any(flag.startswith("--grpo-group-size") for flag in extra):
        run += ["--grpo-group-size=8", "--grpo-prompts-per-step=8"]
    config, problems = read_config([*shape.flags(), *files, *run, *extra], world_size)
    if problems:
        raise SystemExit("\n".join(map(str, problems)))
    return config


@contextlib.contextmanager
def ranks_of(config: RLConfig, seed: int = 1) -> Iterator[ParallelGroups]:
    """The process groups of a job of all ranks that were started, gone afterwards.

    One thread a rank: its CPU seconds are comparable between contenders, and on a machine that others use too.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # deprecations inside torch and megatron would drown the table
    groups = initialize(config.parallel, current_platform())
    try:
        seed_everything(seed)
        yield groups
    finally:
        shut_down()


def ranks_started() -> int:
    """By torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def command_line(module: str, *, shape: str, vocab: int, rounds: int) -> argparse.ArgumentParser:
    """What every benchmark of a model is asked, with its own defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.benchmark.{module}")
    parser.add_argument("--shape", type=Shape.parse, default=Shape.parse(shape), help="hidden size x layers: 64x3")
    parser.add_argument("--vocab", type=int, default=vocab)
    parser.add_argument("--rounds", type=int, default=rounds, help="in each of which every contender has a turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser


def rollout_flags(parser: argparse.ArgumentParser, group: int) -> None:
    """What is generated."""
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--group", type=int, default=group, help="sequences that share a prompt")


def expert_flags(arguments: argparse.Namespace, *more: str) -> list[str]:
    """Of a model with ``--experts``: four a token, together as wide as the shape's MLP; none without."""
    width = f"--moe-ffn-hidden-size={arguments.shape.ffn // 4}"
    flags = [f"--num-experts={arguments.experts}", "--moe-router-topk=4", width, "--qk-layernorm", *more]
    return flags if arguments.experts else []


def report(module: str, arguments: argparse.Namespace, headers: Sequence[str], rows: Any, **found: Any) -> None:
    """Print the table; write what was found with the settings and `provenance` as JSON, if a file was asked for."""
    print(format_table(headers, rows))
    settings = {name: value.name if isinstance(value, Shape) else value for name, value in vars(arguments).items()}
    settings = {name: value for name, value in settings.items() if not isinstance(value, Path)}
    write_record(arguments.json, {**found, "settings": settings, **provenance(module)})


def report_rounds(module: str, unit: str, arguments: argparse.Namespace, rounds: Sequence[Round], **found: Any) -> None:
    """A line a contender: its median, the extremes, and how often the first one's figure is as large."""
    summary, first = summarise(rounds), next(iter(rounds[0]))
    rows = [
        [name, _digits(median), " .. ".join(map(_digits, summary["spread"][name])),
         summary["ratio"].get(f"{first}/{name}")]
        for name, median in summary["median"].items()
    ]  # fmt: skip
    report(module, arguments, [module, unit, "spread", f"{first} / it"], rows, **summary, **found)


def _digits(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def compete(contenders: Mapping[Any, Callable[[int], float]], rounds: int) -> list[Round]:
    """Every contender has a turn a round, after one round that does not count; each goes first in its turn.

    A contender takes the number of the round and returns what it reached: see `tokens_per_cpu_second`.
    """
    results: list[Round] = []
    names = list(contenders)
    for index in range(rounds + 1):
        reached, start = {}, index % len(names)
        for name in names[start:] + names[:start]:  # nobody always runs on a cold or a warm cache
            gc.collect()  # one contender's garbage must not be paid for by the next
            reached[name] = contenders[name](index)
        results.append({name: reached[name] for name in contenders})
    return results[1:]


def tokens_per_cpu_second(work: Callable[[int], int], round_index: int, at_least: float = 0.5) -> float:
    """Of ``work``, which returns its useful tokens, as often as fills ``at_least`` seconds: one may take only 50 ms."""
    tokens, started = 0, time.process_time()
    while True:
        tokens += work(round_index)
        seconds = time.process_time() - started
        if seconds >= at_least:
            return tokens / seconds


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians, extremes, and the first contender's figure divided by each other's.

    A ratio is the median of the rounds' own ratios: what slows a whole round cancels out.
    """
    first, *others = rounds[0]
    columns = {name: [reached[name] for reached in rounds] for name in (first, *others)}
    ratios = {f"{first}/{other}": [reached[first] / reached[other] for reached in rounds] for other in others}
    found: dict[str, Any] = {"rounds": list(rounds)}
    for median, spread, values in (("median", "spread", columns), ("ratio", "ratio_spread", ratios)):
        found[median] = {name: statistics.median(column) for name, column in values.items()}
        found[spread] = {name: [min(column), max(column)] for name, column in values.items()}
    return found


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
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    named = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    model = named[1] if named else platform.processor() or platform.machine()
    # What torch's CPU kernels may use: AVX2, say, and whether there are 8-bit and matrix instructions.
    present = {"VNNI": torch.cpu._is_vnni_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    instructions = [name if there else f"no {name}" for name, there in present.items()]
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join([model, f"{os.cpu_count()} cores", torch.backends.cpu.get_cpu_capability(), *instructions, *gpu])


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
