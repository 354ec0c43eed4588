"""Grading: groups a second through the environment server and by the grader alone.

    python -m tools.benchmark.grading --json FILE

A group is 16 completions of 2,000 characters, no two alike. ``REST`` is a real server process with its grading
workers, all groups of a turn in flight at once as in a step; ``one by one`` has one request in flight; ``grader``
is the function alone, in this process. Wall-clock seconds: the work is in other processes. The three take turns
on the same texts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.environments.base import Environment
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.config import prepare_environments
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.results import judge
from megatron_rl.errors import MegatronRLError
from megatron_rl.metrics.table import format_table
from megatron_rl.registry import GRADERS
from megatron_rl.types import Task, Transcript
from tools.benchmark.common import record_of, turn_order, write_record
from tools.benchmark.grading_texts import ENVIRONMENTS, environment_entry, groups_of, split_of

Group = list[tuple[Task, Transcript]]
WAYS = {"rest": "REST", "one_by_one": "one by one", "grader": "grader"}


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
            return [_reward(judge(self._environment, item)) for group in groups for item in group]
        compare = GRADERS.get(self._environment.grader)
        return [compare(text.text, task.data["gold"]).reward for group in groups for task, text in group]


def _reward(result: Any) -> float:
    if result.status != "ok":
        raise MegatronRLError(f"a sample could not be graded: {result.code}: {result.message}")
    return result.reward


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Rounds by kind; within a round the kinds follow each other, so that load falls on all of them."""
    entries = [environment_entry(kind, folder) for kind in arguments.graders]
    path = folder / "list.yaml"
    path.write_text(yaml.safe_dump(entries))
    environments = {name: survey.environment for name, survey in prepare_environments(path).items()}
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.grading")
    parser.add_argument("--graders", nargs="+", choices=tuple(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--group", type=int, default=16, help="completions a group")
    parser.add_argument("--characters", type=int, default=2000, help="of a completion")
    parser.add_argument("--groups", type=int, default=16, help="groups a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    if arguments.group < 9:
        parser.error("--group below 9 has right answers only; the check of the graders needs wrong ones")
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(arguments, Path(folder))
    columns = {kind: {way: [one[way] for one in found] for way in WAYS} for kind, found in rounds.items()}
    rates = {kind: {way: statistics.median(each) for way, each in ways.items()} for kind, ways in columns.items()}
    rows = [[kind, *(f"{rates[kind][way]:.1f} ({min(each):.1f} .. {max(each):.1f})" for way, each in ways.items())]
            for kind, ways in columns.items()]  # fmt: skip
    print(format_table(["groups / s", *WAYS.values()], rows))
    write_record(arguments.json, record_of("grading", arguments, groups_per_second=rates, rounds=rounds))


if __name__ == "__main__":
    main()
