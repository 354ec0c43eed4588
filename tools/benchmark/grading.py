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
import functools
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.environments.base import Environment
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.results import judge
from megatron_rl.errors import MegatronRLError
from megatron_rl.registry import GRADERS
from megatron_rl.types import Task, Transcript
from tools.benchmark.common import (
    Round,
    command_line,
    compete,
    record_of,
    seconds_of,
    speed_table,
    summarise,
    write_record,
)
from tools.benchmark.grading_texts import ENVIRONMENTS, environment_entry, groups_of, split_of

Group = list[tuple[Task, Transcript]]


class Contest:
    """One environment, graded in three ways."""

    def __init__(
        self,
        kind: str,
        environment: Environment,
        client: EnvironmentClient,
        runner: asyncio.Runner,
        sizes: argparse.Namespace,
    ) -> None:
        self._environment, self._client = environment, client
        tasks = list(environment.tasks(split_of(environment)))
        self._texts = groups_of(environment, tasks, sizes.group, sizes.characters, sizes.seed)
        self._of_round = functools.cache(lambda index: list(islice(self._texts, sizes.groups)))
        self.ways: dict[str, Callable[[Sequence[Group]], list[float]]] = {
            "REST": lambda groups: runner.run(self._over_http(groups, at_once=True)),
            "one by one": lambda groups: runner.run(self._over_http(groups, at_once=False)),
            "grader": self._alone,
        }
        self._require_same(kind)

    def groups_per_second(self, way: str, index: int) -> float:
        """All ways of a round get the same new texts."""
        groups = self._of_round(index)
        return len(groups) / seconds_of(lambda: self.ways[way](groups))

    def _require_same(self, kind: str) -> None:
        """The ways must agree on what is right, and most of it must have been graded."""
        groups = list(islice(self._texts, 2))
        found = {way: run(groups) for way, run in self.ways.items()}
        highest = self._environment.reward_range[1]
        right = {way: [reward == highest for reward in rewards] for way, rewards in found.items()}
        if any(each != right["grader"] for each in right.values()) or len(set(right["grader"])) < 2:
            raise MegatronRLError(f"{kind}: the ways of grading do not agree, {found}: speeds mean nothing")

    async def _over_http(self, groups: Sequence[Group], *, at_once: bool) -> list[float]:
        requests = (self._client.grade(self._environment.name, group) for group in groups)
        answers = await asyncio.gather(*requests) if at_once else [await request for request in requests]
        return [_reward(result) for answer in answers for result in answer]

    def _alone(self, groups: Sequence[Group]) -> list[float]:
        """The grader's own function: the environment would send what can hang to a worker."""
        if not isinstance(self._environment, DatasetEnvironment):
            return [_reward(judge(self._environment, item)) for group in groups for item in group]
        compare = GRADERS.get(self._environment.grader)
        return [compare(text.text, task.data["gold"]).reward for group in groups for task, text in group]


def _reward(result: Any) -> float:
    if result.failed:
        raise MegatronRLError(f"a sample could not be graded: {result.code}: {result.message}")
    return result.reward


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Round]]:
    """Rounds by kind; within a round the kinds follow each other, so that load falls on all of them."""
    entries = [environment_entry(kind, folder) for kind in arguments.graders]
    path = folder / "list.yaml"
    path.write_text(yaml.safe_dump(entries))
    environments = {spec.name: spec.create() for spec in load_environment_specs(path)}
    with EnvironmentServerProcess(path, folder) as server, asyncio.Runner() as runner:
        client = EnvironmentClient(server.address_file, timeout=300.0)
        contests = {
            kind: Contest(kind, environments[ENVIRONMENTS[kind]], client, runner, arguments)
            for kind in arguments.graders
        }
        turns = {
            (kind, way): partial(contest.groups_per_second, way)
            for kind, contest in contests.items()
            for way in contest.ways
        }
        rounds = compete(turns, arguments.rounds)
    return {kind: [{way: one[of, way] for of, way in turns if of == kind} for one in rounds] for kind in contests}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table a kind, write the record."""
    parser = command_line("grading", rounds=7)
    parser.add_argument("--graders", nargs="+", choices=tuple(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--group", type=int, default=16, help="completions a group")
    parser.add_argument("--characters", type=int, default=2000, help="of a completion")
    parser.add_argument("--groups", type=int, default=16, help="groups a turn")
    arguments = parser.parse_args(argv)
    if arguments.group < 9:
        parser.error("--group below 9 has right answers only; the check of the graders needs wrong ones")
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(arguments, Path(folder))
    for kind, found in rounds.items():
        print(speed_table(kind, "groups / s", found) + "\n")
    kinds = {kind: summarise(found) for kind, found in rounds.items()}
    write_record(arguments.json, record_of("grading", arguments, groups_per_second=kinds))


if __name__ == "__main__":
    main()
