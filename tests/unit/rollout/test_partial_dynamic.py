"""Partial rollouts with dynamic sampling: which groups a step takes, and where all the others are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_rl.algorithms.filters import signal
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.filtering import DynamicSampling, counts_in
from megatron_rl.rollout.journal import StepJournal
from megatron_rl.rollout.partial import PartialCollector, PartialGoal, PartialRollouts, UnfinishedGroups
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, TaskPool
from megatron_rl.rollout.rollouter import RolloutResult
from megatron_rl.types import Completion, Request, SamplingParams, Task
from tests.support.partial_steps import AT_ONCE, LAG, WANTED, Run, resume, saved
from tests.support.rollouts import graded_group

STEPS = 12
DYNAMIC = DynamicSampling(signal.Filter(), max_refills=10)


class InThisOrder:
    """A rollouter whose replica generates groups in the order of ``task_ids``; those of ``equal`` have equal rewards.

    A group that has waited with its grades is taken before all others and is not graded again.
    """

    def __init__(self, task_ids: str, equal: str) -> None:
        self.task_ids, self.equal = task_ids, equal
        self.graded: list[str] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def interrupt(self) -> list[Request]:
        left, self.waiting = self.waiting, []
        return left

    def run(
        self, requests: Sequence[Request], seed: int, version: int, journal: StepJournal, goal: PartialGoal
    ) -> RolloutResult:  # fmt: skip
        finished, self.waiting = {}, sorted(
            requests, key=lambda r: (not r.is_generated, self.task_ids.index(r.source.task.id))
        )  # fmt: skip
        while self.waiting:
            request = self.waiting.pop(0)
            completions = request.so_far or (Completion((5, 0), (-1.0, -1.0), "stop", version),) * 2
            for taken, _ in goal.take([(request, completions)], self):
                rewards = [talk.ended.grade.reward for talk in taken.talks] or self._grade(taken.source.task.id)
                finished[taken.index] = self._group(taken, completions, rewards)
        return RolloutResult(finished, EngineStatistics(), 1.0, 0.5)

    def _grade(self, task: str) -> list[float]:
        self.graded.append(task)
        return [1.0, 1.0] if task in self.equal else [0.0, 1.0]

    @staticmethod
    def _group(request: Request, completions: Sequence[Completion], rewards: Sequence[float]):
        group = graded_group(rewards, request.prompt_ids)
        rollouts = tuple(replace(r, completion=c) for r, c in zip(group.rollouts, completions, strict=True))
        return replace(group, source=request.source, rollouts=rollouts)


def collector(
    answers: InThisOrder, groups: ParallelGroups, wanted: int = 2, at_once: int = 4, refills: int = 10
) -> PartialCollector:
    """Draws a, b, c, ... as far as the order of ``answers`` has letters."""
    count = len(answers.task_ids)

    def source(names: Sequence[str]) -> PromptSource:
        return PromptSource([TaskPool("toy", [Task(name, name) for name in names], 1.0)], lambda *_: (1, 2), 50, seed=1)

    numbers = [int(drawn.task.id) for drawn in source(list(map(str, range(count)))).draw(count)]
    letters = sorted(answers.task_ids)
    prompts = source([letters[numbers.index(place)] for place in range(count)])
    return PartialCollector(
        prompts, RequestFactory(SamplingParams(), 100), answers, groups, ExpectedLengths(), prompts_per_step=wanted,
        group_size=2, max_failed_share=0.5, dynamic=DynamicSampling(signal.Filter(), refills),
        partial=PartialRollouts(at_once, 3, finishes=True), unfinished=UnfinishedGroups(),
    )  # fmt: skip


def step(made: PartialCollector, version: int) -> tuple[str, str, dict[str, float]]:
    """Tasks that are trained on, and those that wait; metrics."""
    found = made.collect(1, version, StepJournal({}))
    assert found is not None
    metrics = made.commit(found)
    waiting = "".join(record["asked"][1] for record in found.unfinished)
    return "".join(group.source.task.id for group in found.groups), waiting, metrics


def test_the_first_that_count_fill_the_step_and_the_rest_waits(one_rank: ParallelGroups) -> None:
    """Of a to d, c and a are generated first, and a counts not. One is missing, half of them counted: two more are
    taken of b, d and the new ones e, f: these are f and b. Both count; b was drawn before, so f waits with its grades.
    """
    answers = InThisOrder("cafbdeghij", equal="a")
    made = collector(answers, one_rank)
    assert step(made, 0)[:2] == ("cb", "def")
    assert answers.graded == ["c", "a", "f", "b"]
    # f is there already, d comes next; g is new and waits.
    trained, waiting, metrics = step(made, 1)
    assert (trained, waiting) == ("df", "eg")
    assert answers.graded == ["c", "a", "f", "b", "d"], "f was graded twice"
    assert (metrics["rollout/token_lag_max"], metrics["training/refills"]) == (1, 0)


def test_refills_end_and_the_step_has_what_it_has(one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture) -> None:
    """Two rounds of two, of which d alone counts: 4 + 2 prompts are drawn."""
    answers = InThisOrder("adbcefgh", equal="abc")
    trained, waiting, metrics = step(collector(answers, one_rank, refills=1), 0)
    assert (trained, waiting, answers.graded) == ("d", "ef", ["a", "d", "b", "c"])
    assert "1 of 2 groups pass the filter after --rl-max-refills 1, of 6 prompts" in caplog.text
    assert metrics["training/counting_share"] == 0.25
    assert (metrics["training/groups_started"], metrics["training/groups_answered"]) == (6, 4)
    assert (metrics["training/groups_put_aside"], metrics["training/refills"]) == (2, 1)
    assert metrics["rollout/score/mean"] == pytest.approx((3 * 2 + 1) / 8)


def test_a_later_round_takes_no_more_than_half_of_what_is_in_flight(one_rank: ParallelGroups) -> None:
    """None counts: after a round of two come rounds of three, half of six in flight, and three may go on."""
    answers = InThisOrder("abcdefghijklmnopqrst", equal="abcdefghijklmnopqrst")
    assert step(collector(answers, one_rank, at_once=6, refills=2), 0)[:2] == ("", "ijk")
    assert answers.graded == list("abcdefgh")


@pytest.fixture
def runs(one_rank: ParallelGroups):
    made: list[Run] = []

    def make(turns: int, *delays: float, **settings: object) -> Run:
        made.append(Run(one_rank, delays, turns, DYNAMIC, **settings))
        return made[-1]

    yield make
    for run in made:
        run.rollouter.close()


@pytest.mark.parametrize("turns", [1, 4], ids=["answers", "conversations"])
def test_no_clock_decides_and_every_prompt_is_accounted_for(runs, turns: int) -> None:
    """It is trained on, dropped as its rewards are equal, or waits: each is in one place."""
    at_once, late = runs(turns, 0.0), runs(turns, 0.004, 0.0, 0.0, 0.002, 0.0)
    trained, equal, drawn, refills, put_back = [], [], 0, 0, 0
    for version in range(STEPS):
        found, other = at_once.step(version), late.step(version)
        assert (found.answered, found.unfinished) == (other.answered, other.unfinished)
        assert len(found.counting) == WANTED
        for place, group in found.answered.items():
            counts = place in found.counting
            assert counts == counts_in(DYNAMIC.counts, group)
            (trained if counts else equal).append(group.source.task.id)
            oldest = min(r.completion.stretches[0][0] for r in group.rollouts)
            assert 0 <= version - oldest <= LAG
        drawn += found.started
        refills += found.rounds - 1
        with_grades = sum(all(t["ended"] for t in r.get("talks", [{"ended": None}])) for r in found.unfinished)
        put_back += with_grades
        if turns == 1:
            assert at_once.judged == len(trained + equal) + with_grades, "a group was graded twice"
        waiting = [record["asked"][1] for record in found.unfinished]
        placed = trained + equal + waiting
        assert len(placed) == len(set(placed)) == drawn
        assert len(waiting) < AT_ONCE
    assert refills > 3
    assert equal
    assert put_back, "no group has waited with its grades"


def test_stale_groups_are_counted_too(runs) -> None:
    run, gone, started, taken = runs(1, 0.0, finishes=False, max_staleness=1, at_once=6), 0, 0, 0
    for version in range(STEPS):
        found = run.step(version)
        gone, started, taken = gone + len(found.dropped), started + found.started, taken + len(found.drawn)
        assert started == taken + gone + len(found.unfinished)
    assert gone


@pytest.mark.parametrize("turns", [1, 4], ids=["answers", "conversations"])
def test_a_killed_run_goes_on_from_its_checkpoint(runs, turns: int) -> None:
    whole, first, resumed = runs(turns, 0.0), runs(turns, 0.0), runs(turns, 0.001, 0.0)
    for version in range(5):
        whole.step(version), first.step(version)
    resume(resumed, saved(first))
    for version in range(5, STEPS):
        assert resumed.step(version).answered == whole.step(version).answered
    assert saved(resumed) == saved(whole)


def test_a_stop_in_a_later_round_leaves_no_trace(runs) -> None:
    """Done again, the step has the same groups."""
    run, whole = runs(1, 0.0), runs(1, 0.0)
    rounds, before, real = [], saved(run), run.rollouter.run
    run.rollouter.run = lambda *asked: rounds.append(asked) or (real(*asked) if len(rounds) < 2 else None)
    assert run.collector.collect(0, 0, StepJournal({})) is None
    assert len(rounds) == 2
    assert saved(run) == before
    run.rollouter.run = real
    assert run.step(0).answered == whole.step(0).answered
