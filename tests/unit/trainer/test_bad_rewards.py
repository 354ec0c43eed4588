"""Twelve kinds of bad rewards in three places: 36 of 36 are refused, and none of them moves a weight.

Each goes the whole way of a step: a real server and its grading worker (or a forged answer), the client, the
rollouter, advantages, batches, the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.wire import write_address
from megatron_rl.errors import EnvironmentFault
from megatron_rl.loop import rl_step
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.reporting import sequence_advantages
from megatron_rl.run.rl import RLRun
from megatron_rl.trainer.update import TrainOutcome
from megatron_rl.types import Grade, RolloutGroup, Task, Transcript
from tests.support.bad_rewards import FORGED, KINDS, forged_answer
from tests.support.rollouts import graded_group
from tests.support.samples import all_equal, weights_of
from tests.support.tiny import tiny_config
from tests.support.toy import toy_run
from tests.unit.environments.test_environment_client import Stub

PLACES = ("plain", "Grade", "wire")
CASES = tuple(product(KINDS, PLACES))
NAME = "bad_rewards"
SAMPLES = 16
ANSWER = Transcript("a", "stop", 1)
Grading = Callable[[Sequence[float | None]], Awaitable[list[Grade]]]
"""One result a reward; None asks for the bad one."""


def code_of(kind: str, place: str) -> str:
    """What a case must be called."""
    return FORGED[kind].code if place == "wire" else "invalid_reward"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentClient]:
    """Of a real server, which grades in worker processes."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "list.yaml").write_text("- environment: tests.support.bad_rewards:BadRewards\n")
    with EnvironmentServerProcess(folder / "list.yaml", folder) as process:
        yield EnvironmentClient(process.address_file)


def grading(client: EnvironmentClient, kind: str, place: str, folder: Path) -> Grading:
    """The grader of the case: the real server for what an environment returns, a lying one for the wire."""
    bad = {"kind": kind, "place": place}

    async def returned(rewards: Sequence[float | None]) -> list[Grade]:
        tasks = [Task("1", "p", bad if reward is None else {"reward": reward}) for reward in rewards]
        return await client.grade(NAME, [(task, ANSWER) for task in tasks])

    async def forged(rewards: Sequence[float | None]) -> list[Grade]:
        stub = Stub((200, forged_answer(FORGED[kind], rewards)))
        try:
            write_address(folder / "forged.json", stub.address)
            liar = EnvironmentClient(folder / "forged.json")
            return await liar.grade(NAME, [(Task("1", "p"), ANSWER)] * len(rewards))
        finally:
            stub.server.shutdown()
            stub.server.server_close()

    return forged if place == "wire" else returned


@dataclass
class Bench:
    """A run that has made one good step, so that momentum would move its weights in an empty update."""

    run: RLRun
    grade: Callable
    first: TrainOutcome
    start: list[torch.Tensor]
    seen: list[RolloutGroup]


@pytest.fixture(scope="module")
def bench(one_rank: ParallelGroups) -> Iterator[Bench]:
    """One for all cases: none of them may leave a trace."""
    config = tiny_config(rl_max_failed_share=1, rl_keep_zero_variance_groups=True)

    async def ask(_: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
        return await bench.grade([text.text for _, text in items])

    async def good(texts: Sequence[str]) -> list[Grade]:
        return [Grade(float(len(set(text)))) for text in texts]

    bench = Bench(toy_run(config, one_rank, ask), good, TrainOutcome({}), [], [])
    bench.run.reporter.records = lambda step, groups, *_: bench.seen.extend(groups)
    bench.start = weights_of(bench.run.policy)
    bench.first = rl_step(bench.run, 1)
    yield bench
    bench.run.closing.close()


def test_a_good_reward_moves_the_weights(bench: Bench) -> None:
    """The control: where nothing is refused the same step does something."""
    assert bench.first.metrics["training/failed_grades"] == 0
    assert bench.first.applied_updates > 0
    assert not all_equal(bench.start, weights_of(bench.run.policy))


def test_there_are_36_cases() -> None:
    assert len(CASES) == len(set(CASES)) == 36
    assert set(FORGED) == set(KINDS)


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_a_step_of_nothing_else_changes_no_weight(
    bench: Bench, client: EnvironmentClient, tmp_path: Path, kind: str, place: str
) -> None:
    before = weights_of(bench.run.policy)
    bench.seen.clear()
    grade = grading(client, kind, place, tmp_path)
    bench.grade = lambda texts: grade([None] * len(texts))
    result = rl_step(bench.run, 2)
    grades = [rollout.grade for group in bench.seen for rollout in group.rollouts]
    assert len(grades) == SAMPLES
    assert {(g.failed, g.code, g.reward) for g in grades} == {(True, code_of(kind, place), None)}
    assert all(grade.message for grade in grades)
    assert result.metrics["training/failed_grades"] == SAMPLES
    assert (result.applied_updates, result.skipped_updates) == (0, 0)
    assert not any(name.startswith(("critic/", "actor/")) for name in result.metrics)
    assert all_equal(before, weights_of(bench.run.policy))


def test_the_same_step_stops_a_run_that_tolerates_no_failures(
    bench: Bench, client: EnvironmentClient, tmp_path: Path
) -> None:
    before, collector = weights_of(bench.run.policy), bench.run.collector
    grade = grading(client, "nan", "plain", tmp_path)
    bench.grade = lambda texts: grade([None] * len(texts))
    bench.run.collector = replace(collector, max_failed_share=0.05)
    try:
        with pytest.raises(EnvironmentFault, match=r"16 of 16 grades failed \(invalid_reward 16\)"):
            rl_step(bench.run, 2)
    finally:
        bench.run.collector = collector
    assert all_equal(before, weights_of(bench.run.policy))


def group_of(grades: Sequence[Grade], keep: Sequence[int], prompt: int) -> RolloutGroup:
    """The rollouts ``keep`` of a group with these grades."""
    group = graded_group([0.0] * len(grades), prompt_ids=(prompt, 2))
    rollouts = [replace(rollout, grade=grade) for rollout, grade in zip(group.rollouts, grades, strict=True)]
    return replace(group, rollouts=tuple(rollouts[index] for index in keep))


def updated(groups: ParallelGroups, rollouts: Sequence[RolloutGroup]) -> tuple[list[float], list[torch.Tensor]]:
    """Advantages, and the weights of a fresh policy after the step on these rollouts."""
    run = toy_run(tiny_config(rl_advantage="dr_grpo", rl_keep_zero_variance_groups=True), groups)
    try:
        samples, rewards = run.samples.build(rollouts, range(len(rollouts)), 0)
        outcome = run.trainer.step(run.batches.updates(samples, 64, seed=5), rewards)
        assert outcome.skipped_updates == 0
        advantages: dict[tuple[int, int], float] = {}
        for batch in (batch for part in outcome.updates for batch in part):
            advantages |= sequence_advantages(batch)
        return [advantages[sample.sample_id, 0] for sample in samples], weights_of(run.policy)
    finally:
        run.closing.close()


@pytest.fixture(scope="module")
def without_the_sample(one_rank: ParallelGroups) -> dict[bool, tuple[list[float], list[torch.Tensor]]]:
    """The updates on good samples alone, by whether the whole second answer is lost.

    Baselines by hand: of 1 and 0 it is 0.5, of 1 and 0.25 it is 0.625; an invented 0 would make that 0.4167.
    """
    ok = [Grade(reward) for reward in (1.0, 0.0, 0.25)]
    first = group_of([ok[0], ok[1]], (0, 1), prompt=1)
    second = group_of([ok[0], ok[1], ok[2]], (0, 2), prompt=3)
    return {True: updated(one_rank, [first]), False: updated(one_rank, [first, second])}


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_among_good_ones_it_is_as_if_it_were_not_there(
    one_rank: ParallelGroups,
    client: EnvironmentClient,
    tmp_path: Path,
    without_the_sample: dict[bool, tuple[list[float], list[torch.Tensor]]],
    kind: str,
    place: str,
) -> None:
    """Rewards 1, bad and 0.25 give advantages +-0.375; the update is bit for bit that of 1 and 0.25."""
    grades = asyncio.run(grading(client, kind, place, tmp_path)([1.0, None, 0.25]))
    lost = place == "wire" and FORGED[kind].spoils_the_answer
    assert [grade.failed for grade in grades] == ([True] * 3 if lost else [False, True, False])
    assert grades[1].code == code_of(kind, place)
    first = group_of([Grade(1.0), Grade(0.0)], (0, 1), prompt=1)
    advantages, weights = updated(one_rank, [first, group_of(grades, (0, 1, 2), prompt=3)])
    assert advantages == ([0.5, -0.5] if lost else [0.5, -0.5, 0.375, -0.375])
    assert all_equal(weights, without_the_sample[lost][1])


def test_a_good_sample_in_its_place_would_have_changed_the_update(
    one_rank: ParallelGroups, without_the_sample: dict[bool, tuple[list[float], list[torch.Tensor]]]
) -> None:
    """The control of the comparison above."""
    ok = [Grade(reward) for reward in (1.0, 0.0, 0.25)]
    first = group_of(ok[:2], (0, 1), prompt=1)
    _, weights = updated(one_rank, [first, group_of(ok, (0, 1, 2), prompt=3)])
    assert not all_equal(weights, without_the_sample[False][1])
