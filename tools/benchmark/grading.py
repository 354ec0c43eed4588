"""Grading: groups a second through the environment server and by the grader alone, and what a step pays for it.

    python tools/benchmark/grading.py --run-dir runs/quickstart --json FILE

A group is 16 completions of 2,000 characters, no two alike. ``REST`` is a real server process with its grading
workers, all groups of a turn in flight at once as in a step; ``one by one`` has one request in flight; ``grader``
is the function alone, in this process. Wall-clock seconds: the work is in other processes. The three take turns
on the same texts.

The share of a step is the time that REST takes for as many groups as the step has, over the step's own time, as
if nothing overlapped; in a run grading goes on while the rest generates. The step is the median one of
``--run-dir``, or ``--step-seconds``, or that of a small run made here: the quickstart's GRPO step from random
weights, on one rank.
"""

from __future__ import annotations

import argparse
import asyncio
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.environments.base import Environment
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.config import set_up_environments
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.grading import grade_one
from megatron_rl.environments.grading.discovery import kind_module
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.errors import MegatronRLError
from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.metrics.names import timing
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.table import format_table
from megatron_rl.types import Task, Transcript
from tools.benchmark.common import provenance, turn_order, write_record
from tools.benchmark.grading_texts import ENVIRONMENTS, environment_entry, groups_of, split_of

ROOT = Path(__file__).parents[2]
Group = list[tuple[Task, Transcript]]
WAYS = {"rest": "REST", "one_by_one": "one by one", "grader": "grader"}


@dataclass(frozen=True)
class Step:
    """The training step that grading is compared with."""

    seconds: float
    prompts: int
    source: str


class Contest:
    """One environment, graded in three ways."""

    def __init__(
        self, kind: str, environment: Environment, client: EnvironmentClient, sizes: argparse.Namespace
    ) -> None:
        self._environment, self._client = environment, client
        tasks = list(environment.tasks(split_of(environment)))
        self._groups: Iterator[Group] = groups_of(environment, tasks, sizes.group, sizes.characters, sizes.seed)
        self._per_turn = sizes.groups
        self._ways: dict[str, Callable[[Sequence[Group]], list[float]]] = {
            "rest": lambda groups: asyncio.run(self._together(groups)),
            "one_by_one": lambda groups: asyncio.run(self._one_by_one(groups)),
            "grader": self._alone,
        }
        self._require_same(kind)

    def round(self, index: int) -> dict[str, float]:
        """Groups a second by way, all on the same new texts."""
        groups = list(islice(self._groups, self._per_turn))
        rates = {}
        for way in turn_order(list(self._ways), index):
            started = time.perf_counter()
            self._ways[way](groups)
            rates[way] = len(groups) / (time.perf_counter() - started)
        return rates

    def _require_same(self, kind: str) -> None:
        """The warm-up: the ways must agree on what is right, and most of it must have been graded."""
        groups = list(islice(self._groups, 2))
        found = {way: run(groups) for way, run in self._ways.items()}
        right = [reward > 0 for reward in found["grader"]]
        if any([reward > 0 for reward in rewards] != right for rewards in found.values()) or len(set(right)) < 2:
            raise MegatronRLError(f"{kind}: the ways of grading do not agree, {found}: speeds mean nothing")

    async def _together(self, groups: Sequence[Group]) -> list[float]:
        answers = await asyncio.gather(*(self._client.grade(self._environment.name, group) for group in groups))
        return [_reward(result) for answer in answers for result in answer]

    async def _one_by_one(self, groups: Sequence[Group]) -> list[float]:
        answers = [await self._client.grade(self._environment.name, group) for group in groups]
        return [_reward(result) for answer in answers for result in answer]

    def _alone(self, groups: Sequence[Group]) -> list[float]:
        """The grader's own function: the environment would send what can hang to a worker."""
        if not isinstance(self._environment, DatasetEnvironment):
            return [_reward(grade_one(self._environment, *item)) for group in groups for item in group]
        judge = kind_module(self._environment.grader).judge
        return [judge(text.text, task.data["gold"]).reward for group in groups for task, text in group]


def _reward(result: Any) -> float:
    if result.status != "ok":
        raise MegatronRLError(f"a sample could not be graded: {result.code}: {result.message}")
    return result.reward


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Rounds by kind; within a round the kinds follow each other, so that load falls on all of them."""
    entries = [environment_entry(kind, folder) for kind in arguments.graders]
    path = folder / "list.yaml"
    path.write_text(yaml.safe_dump(entries))
    environments = set_up_environments(path)
    with EnvironmentServerProcess(path, folder) as server:
        client = EnvironmentClient(server.address_file, timeout=300.0)
        contests = {
            kind: Contest(kind, environments[ENVIRONMENTS[kind]], client, arguments) for kind in arguments.graders
        }
        rounds = [
            {kind: contests[kind].round(index) for kind in turn_order(arguments.graders, index)}
            for index in range(arguments.rounds)
        ]
    return {kind: [one[kind] for one in rounds] for kind in arguments.graders}


def summarise(rounds: Mapping[str, Sequence[Mapping[str, float]]], step: Step) -> dict[str, Any]:
    """Medians and extremes in groups a second, and the share of the step."""
    columns = {kind: {way: [one[way] for one in found] for way in WAYS} for kind, found in rounds.items()}
    rates = {kind: {way: statistics.median(each) for way, each in ways.items()} for kind, ways in columns.items()}
    return {
        "groups_per_second": rates,
        "spread": {kind: {way: [min(each), max(each)] for way, each in ways.items()} for kind, ways in columns.items()},
        "step": asdict(step),
        "share_of_step": {kind: step.prompts / ways["rest"] / step.seconds for kind, ways in rates.items()},
    }


def step_of(run_dir: Path, source: str = "") -> Step:
    """The median step of a run and its number of groups."""
    run = RunDirectory(run_dir)
    seconds = [row[timing("step")] for row in read_rows(run.metrics) if row.get(timing("step"))]
    if not seconds or not run.config.is_file():
        raise SystemExit(f"{run_dir} holds no run with steps; give another --run-dir, or --step-seconds")
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    prompts = config["algorithm"]["grpo_prompts_per_step"]
    return Step(statistics.median(seconds), prompts, source or f"median of {len(seconds)} steps of {run_dir.name}")


def small_run(folder: Path, steps: int = 6) -> Step:
    """The quickstart's GRPO step, from random weights, on one rank."""
    runpy.run_path(str(ROOT / "examples/quickstart/make_tokenizer.py"))["main"](folder / "tokenizer")
    flags = (
        f"--num-layers 3 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --group-query-attention "
        f"--num-query-groups 2 --swiglu --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights "
        f"--normalization RMSNorm --make-vocab-size-divisible-by 16 --seq-length 64 --perform-rl-step "
        f"--grpo-group-size 16 --grpo-prompts-per-step 16 --rl-max-new-tokens 44 --micro-batch-size 64 "
        f"--rl-keep-zero-variance-groups --train-iters {steps} --lr 8e-4"
    )
    files = [
        f"--langrl-env-config={ROOT / 'examples/quickstart/environments.yaml'}",
        f"--tokenizer-model={folder / 'tokenizer'}",
        f"--run-dir={folder / 'run'}",
    ]
    command = [sys.executable, str(ROOT / "train_rl.py"), *flags.split(), *files]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return step_of(folder / "run", f"median of {steps} steps of the quickstart's size, random weights, one rank")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults are groups of 16 completions of 2 kB."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.grading")
    parser.add_argument("--graders", nargs="+", choices=tuple(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--group", type=int, default=16, help="completions a group")
    parser.add_argument("--characters", type=int, default=2000, help="of a completion")
    parser.add_argument("--groups", type=int, default=16, help="groups a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--run-dir", type=Path, help="a run whose steps grading is compared with")
    step.add_argument("--step-seconds", type=float, help="seconds of a step of --groups prompts")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    if arguments.group < 9:
        parser.error("--group below 9 has right answers only; the check of the graders needs wrong ones")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.step_seconds is not None:
            step = Step(arguments.step_seconds, arguments.groups, "given by --step-seconds")
        else:
            step = step_of(arguments.run_dir) if arguments.run_dir is not None else small_run(folder)
        rounds = measure(arguments, folder)
    record = summarise(rounds, step)
    rates, spread = record["groups_per_second"], record["spread"]
    rows = [
        [kind, *(f"{rates[kind][way]:.1f} ({spread[kind][way][0]:.1f} .. {spread[kind][way][1]:.1f})" for way in WAYS),
         f"{1e3 * step.prompts / rates[kind]['rest']:.0f}", f"{record['share_of_step'][kind]:.1%}"]
        for kind in rates
    ]  # fmt: skip
    print(format_table(["groups / s", *WAYS.values(), "ms a step", "share"], rows))
    print(f"step: {step.prompts} groups, {step.seconds:.3f} s, {step.source}")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "run_dir")}
    write_record(arguments.json, {**record, "rounds": rounds, "settings": settings, **provenance("grading")})


if __name__ == "__main__":
    main()
