"""Useful rollout tokens per CPU second: partial rollouts against waiting for everybody, on lengths with a long tail.

    python -m tools.benchmark.partial --prompts 8 --group 8 --at-once 16 --lag 3 --median 64 --longest 8

One process, one thread, the same weights, engine and rows. There is no end token: each sample has a length of its own,
log-normal, cut at ``--longest`` times the median, which the engine does not know in advance. ``--sigma`` 0.75 makes the
longest of 64 about six times the median. A turn is ``--steps`` steps of rollouts; useful tokens are those of the groups
that the steps were given; decode steps, rows and prefilled tokens are told for each of them. What partial rollouts put
aside goes on in the next turn, and is computed anew for it.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial as bound

from megatron_rl.inference.engine import EngineOptions, EngineStatistics
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.scheduler import Scheduler
from megatron_rl.inference.sequence import Sequence as Sample
from megatron_rl.models.gpt import PolicyModel, build_model, rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.rollout.partial import PartialGoal, PartialRollouts, goal_of
from megatron_rl.rollout.prompt_source import ExpectedLengths
from megatron_rl.types import Hints, Request, SamplingParams, SourcedTask, Task
from tools.benchmark.common import (
    SPEED,
    benchmark_config,
    command_line,
    compete,
    random_prompts,
    ranks_of,
    report_rounds,
    tokens_per_cpu_second,
)


@dataclass(frozen=True)
class Lengths:
    """How long each sample becomes."""

    median: int
    sigma: float
    most: int
    seed: int

    def of(self, task: str, sample: int) -> int:
        """New tokens, 1 or more."""
        drawn = random.Random(f"{self.seed} {task} {sample}").lognormvariate(math.log(self.median), self.sigma)
        return max(1, min(self.most, round(drawn)))

    def limit(self, scheduler: Scheduler) -> None:
        """Every sample that is added gets the limit of its own, which stands for its end token."""
        add = scheduler.add

        def limited(sample: Sample) -> None:
            add(sample)
            limit = self.of(sample.group.request.source.task.id, sample.sample)
            sample.request = replace(sample.request, sampling=replace(sample.request.sampling, max_new_tokens=limit))

        scheduler.add = limited


@dataclass
class Rollouts:
    """Steps of one contender over a stream of prompts of its own."""

    engine: RolloutEngine
    policy: PolicyModel
    prompts: list[tuple[int, ...]]
    group: int
    wanted: int
    sampling: SamplingParams
    settings: PartialRollouts | None  # None: a step waits for all its groups
    version: int = 0
    begun: list[Request] = field(default_factory=list)
    drawn: int = 0
    lags: list[int] = field(default_factory=list)  # of every useful token
    work: EngineStatistics = field(default_factory=EngineStatistics)

    def step(self) -> int:
        """Return the useful tokens of one step."""
        at_once = self.wanted if self.settings is None else self.settings.at_once
        while len(self.begun) < at_once:
            source = SourcedTask("benchmark", Task(str(self.drawn), ""))
            prompt = self.prompts[self.drawn % len(self.prompts)]
            self.begun.append(Request(source, prompt, self.group, self.sampling))
            self.drawn += 1
        requests = [replace(request, index=place) for place, request in enumerate(self.begun)]
        due = set() if self.settings is None else self.settings.due(requests, self.version, self.wanted)
        goal = goal_of(requests, due, self.wanted, ExpectedLengths(), 0, 1)
        tokens = self._generate(goal)
        self.work += self.engine.statistics
        self.begun = sorted(goal.unfinished, key=lambda request: request.index)
        self.version += 1
        return tokens

    def _generate(self, goal: PartialGoal) -> int:
        tokens, engine = 0, self.engine
        with rollout_mode(self.policy):
            engine.begin(self.version, self.version)
            for request in goal.requests:
                if not request.is_generated:
                    engine.submit(replace(request, hints=Hints(self.sampling.max_new_tokens)))
            generated = [(request, request.so_far) for request in goal.requests if request.is_generated]
            taken = goal.take(generated, engine)
            while True:
                for _, completions in taken:
                    tokens += sum(len(completion.token_ids) for completion in completions)
                    stretches = (stretch for completion in completions for stretch in completion.stretches)
                    self.lags += [self.version - version for version, size in stretches for _ in range(size)]
                if not engine.has_unfinished:
                    return tokens
                taken = goal.take(engine.step(), engine)


def main(argv: Sequence[str] | None = None) -> None:
    """Build, measure and report."""
    arguments = parse(argv)
    most, size = arguments.longest * arguments.median, arguments.prompts * arguments.group
    length, rows = arguments.prompt_tokens + most, arguments.rows or size
    lengths = Lengths(arguments.median, arguments.sigma, most, arguments.seed)
    config = benchmark_config(arguments.shape, length)
    with ranks_of(config, arguments.seed):
        policy = build_model(config, current_platform(), arguments.vocab)
        prompts = random_prompts(1000, arguments.prompt_tokens, arguments.vocab, arguments.seed)
        contenders = {}
        for name, way in (("partial", PartialRollouts(arguments.at_once, arguments.lag, finishes=True)),
                          ("waiting", None)):  # fmt: skip
            engine = RolloutEngine(policy, EngineOptions(rows, length), (), str)
            lengths.limit(engine._scheduler)
            sampling = SamplingParams(max_new_tokens=most)
            contenders[name] = Rollouts(engine, policy, prompts, arguments.group, arguments.prompts, sampling, way)

        def work(name: str, _: int) -> int:
            return sum(contenders[name].step() for _ in range(arguments.steps))

        turns = {name: bound(tokens_per_cpu_second, bound(work, name), at_least=0.0) for name in contenders}
        rounds = compete(turns, arguments.rounds)
    lags = contenders["partial"].lags
    seen = [lengths.of(str(task), sample) for task in range(1000) for sample in range(arguments.group)]
    steps = [seen[at : at + size] for at in range(0, len(seen), size)]
    found = {
        f"{name}_{what}": getattr(contenders[name].work, what) / len(contenders[name].lags)
        for name in contenders for what in ("decode_steps", "decode_rows", "prefill_tokens")
    }  # fmt: skip
    found |= {
        "stale_share": sum(lag > 0 for lag in lags) / len(lags), "lag_max": max(lags),
        "mean_length": statistics.mean(seen),
        "longest_of_a_step": statistics.median(max(step) / arguments.median for step in steps),
    }  # fmt: skip
    report_rounds("partial", f"useful {SPEED}", arguments, rounds, **found)
    print(", ".join(f"{name} {value:.3g}" for name, value in found.items()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line("partial", shape="64x3", vocab=512, rounds=8)
    for name, default, what in (
        ("--prompts", 8, "groups of a step"),
        ("--group", 8, "samples of a prompt"),
        ("--at-once", 16, "groups in flight with partial rollouts"),
        ("--lag", 3, "updates that the oldest token may be behind"),
        ("--rows", 0, "samples decoded at once; 0: as many as a step has"),
        ("--median", 64, "tokens"),
        ("--sigma", 0.75, "of the logarithm of a length"),
        ("--longest", 8, "lengths are cut at so many times the median"),
        ("--prompt-tokens", 16, "of a prompt"),
        ("--steps", 3, "of a turn"),
    ):
        parser.add_argument(name, type=type(default), default=default, help=what)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
