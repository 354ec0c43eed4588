"""Idle share of the generation with groups dealt to the ranks in turn, and by expected length.

    python -m tools.benchmark.balance --shape 64x3 --ranks 2 --medians 16,64
    python -m tools.benchmark.balance --count --ranks 64 --groups 512

One process generates the shares of all ranks, one after the other, and counts CPU seconds: ranks that share a busy
machine would slow each other down. Environments are drawn by turns, as equal weights do it. A task has a length of
its own, log-normal around its environment's median, and its samples vary around that; the end token is disabled, so
every sequence runs to the length that was drawn for it. ``--count`` generates nothing: a rank takes as long as it has
tokens.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_rl.inference import Engine, RolloutEngine
from megatron_rl.inference.rollout_engine import EngineOptions
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model, rollout_mode
from megatron_rl.packing.bins import balance
from megatron_rl.parallel import initialize, seed_everything, shut_down
from megatron_rl.platform import current_platform
from megatron_rl.rollout.expected_length import ExpectedLengths, deal
from megatron_rl.types import GenerationRequest, SamplingParams, SourcedTask, Task
from tools.benchmark.common import (
    Shape,
    benchmark_config,
    prepare,
    provenance,
    random_prompts,
    write_record,
)

SAMPLES_SIGMA = 0.3
"""Of log lengths within a group; that of tasks is a flag."""


@dataclass(frozen=True)
class Group:
    """A group of a step, and what nobody knows before it is generated."""

    request: GenerationRequest
    lengths: tuple[int, ...]
    """One a sample."""

    @property
    def mean(self) -> float:
        """Tokens of a completion."""
        return sum(self.lengths) / len(self.lengths)

    def sequences(self) -> list[GenerationRequest]:
        """One request a sample: a limit belongs to a request."""
        sampling, size = self.request.sampling, len(self.lengths)
        return [
            replace(self.request, num_samples=1, index=self.request.index * size + sample,
                    sampling=replace(sampling, max_new_tokens=length))
            for sample, length in enumerate(self.lengths)
        ]  # fmt: skip


def make_steps(arguments: argparse.Namespace) -> list[list[Group]]:
    """The groups of every step: each environment goes through its tasks, epoch after epoch, each time reshuffled."""
    draw = random.Random(arguments.seed)
    limit, medians = arguments.new_tokens, arguments.medians
    groups = arguments.groups * arguments.steps
    prompts = random_prompts(arguments.tasks, arguments.prompt_tokens, arguments.vocab, arguments.seed)
    typical = [[median * math.exp(draw.gauss(0, arguments.sigma)) for _ in prompts] for median in medians]
    orders: list[list[int]] = [[] for _ in medians]
    made: list[Group] = []
    for number in range(groups):
        environment = number % len(medians)
        orders[environment] = orders[environment] or draw.sample(range(arguments.tasks), arguments.tasks)
        task = orders[environment].pop()
        lengths = [typical[environment][task] * math.exp(draw.gauss(0, SAMPLES_SIGMA)) for _ in range(arguments.group)]
        source = SourcedTask(f"environment {environment}", Task(str(task), ""))
        sampling = SamplingParams(max_new_tokens=limit)
        request = GenerationRequest(source, prompts[task], arguments.group, sampling, number % arguments.groups)
        made.append(Group(request, tuple(min(max(round(length), 1), limit) for length in lengths)))
    return [made[at : at + arguments.groups] for at in range(0, groups, arguments.groups)]


Deal = Callable[[Sequence[Group]], list[int]]
"""The rank of every group."""


def dealers(expected: ExpectedLengths, ranks: int) -> dict[str, Deal]:
    """In turn, by what was learned, and by the lengths themselves, which is the most that knowing them can bring."""
    return {
        "in turn": lambda groups: [number % ranks for number in range(len(groups))],
        "by length": lambda groups: deal([group.request for group in groups], expected, ranks),
        "known": lambda groups: balance([round(tokens_of([group])) for group in groups], ranks),
    }


Cost = Callable[[Sequence[Group]], float]
"""How long a rank takes for its share."""


def tokens_of(groups: Sequence[Group]) -> float:
    """As if every token took the same time."""
    return float(sum(len(group.request.prompt_ids) + sum(group.lengths) for group in groups))


def seconds_of(engine: Engine, policy: PolicyModel, groups: Sequence[Group]) -> float:
    """CPU seconds of generating them."""
    gc.collect()
    with rollout_mode(policy):
        started = time.process_time()
        engine.begin(1, policy_version=0)
        for group in groups:
            for request in group.sequences():
                engine.submit(request)
        while engine.has_unfinished:
            engine.step()
        return time.process_time() - started


def measure(arguments: argparse.Namespace, cost: Cost) -> list[dict[str, dict[str, float]]]:
    """Of every step and dealer: idle share, and what the slowest rank took."""
    expected, ranks = ExpectedLengths(), range(arguments.ranks)
    steps = make_steps(arguments)
    cost(steps[0])  # the first time is not counted
    found = []
    for groups in steps:
        row = {}
        for name, dealt_by in dealers(expected, arguments.ranks).items():
            rank_of = dealt_by(groups)
            costs = [cost([g for g, own in zip(groups, rank_of, strict=True) if own == rank]) for rank in ranks]
            row[name] = {"idle": 1 - sum(costs) / len(costs) / max(costs), "slowest": max(costs)}
        expected.learn((group.request.source, group.mean) for group in groups)
        found.append(row)
    return found


def summarise(found: Sequence[dict[str, dict[str, float]]], first_epoch: int) -> dict[str, dict[str, float]]:
    """Mean idle share of the first step, of the rest of the first epoch and of what follows.

    ``slowest rank`` is how long the generation takes, as a share of that with groups dealt in turn; mean over steps.
    """
    parts = {"first step": found[:1], "first epoch": found[1:first_epoch], "later epochs": found[first_epoch:]}
    return {
        name: {
            **{part: sum(row[name]["idle"] for row in rows) / len(rows) for part, rows in parts.items() if rows},
            "slowest rank": sum(row[name]["slowest"] / row["in turn"]["slowest"] for row in found) / len(found),
        }
        for name in found[0]
    }


def generated(arguments: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """`measure` with our engine."""
    prepare()
    length = arguments.prompt_tokens + arguments.new_tokens
    config = benchmark_config(arguments.shape, length)
    platform = current_platform()
    initialize(config.parallel, platform)
    try:
        seed_everything(arguments.seed)
        policy = build_model(config, platform, arguments.vocab)
        engine = RolloutEngine(policy, EngineOptions(arguments.batch, length), stop_token_ids=[], decode_text=str)
        return measure(arguments, partial(seconds_of, engine, policy))
    finally:
        shut_down()


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure, or count."""
    found = measure(arguments, tokens_of) if arguments.count else generated(arguments)
    first_epoch = math.ceil(arguments.tasks * len(arguments.medians) / arguments.groups)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "shape")}
    return {
        "dealt": summarise(found, first_epoch),
        "steps": found,
        "settings": {"shape": str(arguments.shape), **settings},
        **provenance("balance"),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.balance")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", type=Shape.parse, help="hidden size x layers: 64x3")
    what.add_argument("--count", action="store_true", help="generate nothing, count tokens")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--medians", type=lambda text: [float(part) for part in text.split(",")], default=[16.0, 64.0],
                        help="median completion length of each environment")  # fmt: skip
    parser.add_argument("--sigma", type=float, default=0.8, help="of the tasks' log lengths")
    parser.add_argument("--tasks", type=int, default=48, help="of each environment")
    parser.add_argument("--groups", type=int, default=16, help="in a step, of all ranks")
    parser.add_argument("--group", type=int, default=8, help="samples of a group")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    arguments = parse(argv)
    record = run(arguments)
    dealt = record["dealt"]
    parts = list(next(iter(dealt.values())))
    rows = [[name, *(round(found[part], 3) for part in parts)] for name, found in dealt.items()]
    print(format_table(["dealt", *parts], rows))
    write_record(arguments.json, record)


if __name__ == "__main__":
    main()
