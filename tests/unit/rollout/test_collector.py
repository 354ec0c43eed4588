"""Which groups a step takes, what it draws when they are too few, and what the next step finds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_rl.algorithms.filters import signal
from megatron_rl.errors import EnvironmentFault
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.collector import Collector
from megatron_rl.rollout.dynamic_sampling import DynamicCollector
from megatron_rl.rollout.filtering import DynamicSampling
from megatron_rl.rollout.journal import ExtraGroups, StepJournal
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, TaskPool
from megatron_rl.rollout.rollouter import Goal, RolloutResult
from megatron_rl.types import Request, RolloutGroup, SamplingParams, Task
from tests.support.rollouts import graded_group

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Answers:
    """A rollouter: the tasks in ``good`` get rewards that differ, those in ``failed`` none, those in ``late`` later."""

    def __init__(self, good: str, failed: str = "", stops_at: int | None = None, late: str = "") -> None:
        self.good, self.failed, self.stops_at, self.late = good, failed, stops_at, late
        self.draws: list[str] = []
        self.known: list[str] = []

    def run(
        self,
        requests: Sequence[Request],
        seed: int,
        policy_version: int,
        journal: StepJournal,
        goal: Goal | None = None,
    ) -> RolloutResult | None:
        self.draws.append("".join(request.source.task.id for request in requests))
        self.version = policy_version
        if len(self.draws) == self.stops_at:
            return None
        finished = {request.index: self._answer(request, journal) for request in requests}
        soon = {r.index: finished[r.index] for r in requests if r.source.task.id not in self.late}
        for look in itertools.count():
            done = finished if look > 50 or not self.late else soon
            if goal is None or goal.is_met(done, idle=True):
                finished = done
                break
            time.sleep(0.001)
        return RolloutResult(finished, EngineStatistics(decode_steps=1), 1.0, 0.5)

    def _answer(self, request: Request, journal: StepJournal) -> RolloutGroup:
        task, known = request.source.task.id, journal.group_for(request)
        if known is not None:
            self.known.append(task)
            return known
        rewards = [None, None] if task in self.failed else [0.0, 1.0] if task in self.good else [1.0, 1.0]
        group = graded_group(rewards, request.prompt_ids)
        rollouts = [
            replace(rollout, completion=replace(rollout.completion, policy_version=self.version))
            for rollout in group.rollouts
        ]
        return replace(group, source=request.source, rollouts=tuple(rollouts))


def source() -> PromptSource:
    """Draws a, b, c, ..."""

    def of(names: Sequence[str]) -> PromptSource:
        return PromptSource([TaskPool("toy", [Task(name, name) for name in names], 1.0)], lambda *_: (1, 2), 50, seed=1)

    numbers = [int(drawn.task.id) for drawn in of(list(map(str, range(26)))).draw(26)]
    return of([LETTERS[numbers.index(place)] for place in range(26)])


def collector(
    answers: Answers,
    groups: ParallelGroups,
    wanted: int = 3,
    at_once: int = 5,
    refills: int = 2,
    max_staleness: int = 0,
) -> DynamicCollector:
    return DynamicCollector(
        source(), RequestFactory(SamplingParams(), 100), answers, groups, ExpectedLengths(),
        prompts_per_step=wanted, group_size=2, max_failed_share=0.5,
        dynamic=DynamicSampling(signal.Filter(), refills), at_once=at_once, max_staleness=max_staleness,
    )  # fmt: skip


def step(made: Collector, version: int = 0) -> tuple[str, SimpleNamespace]:
    """The tasks of the groups that count."""
    found = made.collect(1, version, StepJournal({}, extra_groups=made.extra_groups))
    assert found.numbers == tuple(range(len(found.groups)))
    return "".join(group.source.task.id for group in found.groups), found


def test_the_first_ones_that_count_and_the_others_come_again(one_rank: ParallelGroups) -> None:
    answers = Answers(good="acdefgh")
    made = collector(answers, one_rank)
    tasks, found = step(made)
    assert tasks == "acd"
    assert [task.task.id for task in found.drawn] == list("abcd")
    assert sorted(found.answered) == [0, 1, 2, 3]
    assert sorted(found.extra) == [4]
    assert step(made)[0] == "efg"
    assert answers.draws == ["abcde", "efghi"]


def test_a_refill_is_as_large_as_the_share_that_counted_suggests(one_rank: ParallelGroups) -> None:
    """Of a to e one counts and two are wanted: 2 x 5 / 1, at most 5 at once. Then 3 of 10, one is wanted: 4."""
    answers = Answers(good="agjk")
    made = collector(answers, one_rank, wanted=4)
    tasks, found = step(made)
    assert tasks == "agjk"
    assert answers.draws == ["abcde", "fghij", "klmn"]
    assert (found.rounds - 1, found.started, len(found.drawn)) == (2, 14, 11)
    assert made.source.draw(1)[0].task.id == "l"
    assert found.statistics.decode_steps == 3
    assert (found.generate_seconds, found.grade_wait_seconds) == (3.0, 1.5)


def test_refills_end(one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers(good="b")
    made = collector(answers, one_rank, refills=1)
    tasks, found = step(made)
    assert tasks == "b"
    assert answers.draws == ["abcde", "fghij"]
    assert "1 of 3 groups pass the filter after --rl-max-refills 1, of 10 prompts" in caplog.text
    metrics = made.commit(found)
    assert metrics["training/refills"] == 1
    assert metrics["training/groups_started"] == metrics["training/groups_answered"] == 10
    assert metrics["training/counting_share"] == 0.1
    assert metrics["rollout/score/mean"] == pytest.approx(0.95)
    assert "critic/rewards/mean" not in metrics


def test_a_step_in_which_none_counts_can_say_why(one_rank: ParallelGroups) -> None:
    made = collector(Answers(good=""), one_rank, refills=0)
    tasks, found = step(made)
    assert tasks == ""
    assert made.commit(found)["critic/rewards/min"] == 1.0


def test_a_grader_that_fails_is_no_reason_to_draw_on(one_rank: ParallelGroups) -> None:
    answers = Answers(good="", failed=LETTERS)
    with pytest.raises(EnvironmentFault, match="10 of 10 grades failed"):
        step(collector(answers, one_rank))
    assert len(answers.draws) == 1


def test_a_stop_during_a_refill_leaves_no_trace(one_rank: ParallelGroups) -> None:
    answers = Answers(good="b", stops_at=2)
    made = collector(answers, one_rank)
    before = made.source.position()
    assert made.collect(1, 0, StepJournal({})) is None
    assert made.source.position() == before


def test_extra_groups_are_used_by_the_next_step(one_rank: ParallelGroups) -> None:
    answers = Answers(good="abcdefg")
    made = collector(answers, one_rank, max_staleness=1)
    _, found = step(made)
    assert made.commit(found)["perf/surplus_groups"] == 2
    resumed = ExtraGroups()
    resumed.load_state_dict(made.extra_groups.state_dict())
    made.extra_groups = resumed
    tasks, found = step(made)
    assert (tasks, answers.known) == ("def", ["d", "e"])
    made.commit(found)
    assert [record["asked"][1] for record in made.extra_groups.state_dict()["groups"]] == ["g"]


def test_extra_groups_that_are_found_again_are_kept_once(one_rank: ParallelGroups) -> None:
    made = collector(Answers(good=LETTERS), one_rank, wanted=1, max_staleness=1)
    for kept in ("bcde", "cdef"):
        made.commit(step(made)[1])
        assert [record["asked"][1] for record in made.extra_groups.state_dict()["groups"]] == list(kept)


@pytest.mark.parametrize(("lag", "ages"), [(1, [0, 1, 0, 1, 0, 0]), (3, [0, 1, 2, 3, 0, 0])])
def test_extra_groups_are_as_old_as_they_may_be_and_their_age_is_logged(
    one_rank: ParallelGroups, lag: int, ages: list[int]
) -> None:
    """Of a to e one is wanted in each step: without a bound the ages would be 0, 1, 2, 3, 4, 4."""
    answers = Answers(good=LETTERS)
    made = collector(answers, one_rank, wanted=1, max_staleness=lag)
    for version, age in enumerate(ages):
        answers.known = []
        tasks, found = step(made, version)
        assert (tasks, tasks in answers.known) == (LETTERS[version], age > 0)
        metrics = made.commit(found)
        assert (metrics["rollout/token_lag_max"], metrics["rollout/stale_token_share"]) == (age, float(age > 0))


@pytest.mark.parametrize("late", ["", "d", "de"])
def test_no_clock_decides_which_extra_groups_are_kept(one_rank: ParallelGroups, late: str) -> None:
    """Those that were finished when the step had enough were kept: two runs of one command differed."""
    made = collector(Answers(good=LETTERS, late=late), one_rank, max_staleness=1)
    made.commit(step(made)[1])
    assert [record["asked"][1] for record in made.extra_groups.state_dict()["groups"]] == ["d", "e"]


@pytest.mark.parametrize("late", ["", "de"])
def test_groups_that_nobody_keeps_are_not_waited_for(one_rank: ParallelGroups, late: str) -> None:
    tasks, found = step(collector(Answers(good=LETTERS, late=late), one_rank))
    assert (tasks, sorted(found.extra)) == ("abc", [] if late else [3, 4])


def test_what_is_dropped_is_answered_again(one_rank: ParallelGroups) -> None:
    answers = Answers(good="abcdefg")
    made = collector(answers, one_rank)
    made.commit(step(made)[1])
    assert step(made)[0] == "def"
    assert answers.known == []
    assert made.extra_groups.state_dict() == {"groups": []}


def test_lengths_are_learnt_of_what_was_needed(one_rank: ParallelGroups) -> None:
    """What else is finished by then depends on the clock."""
    made = collector(Answers(good="abcde"), one_rank)
    made.commit(step(made)[1])
    assert sorted(made.expected_lengths.state_dict()["toy"]["tasks"]) == ["a", "b", "c"]


def test_every_request_asks_for_routing_where_it_is_wanted(one_rank: ParallelGroups) -> None:
    made = collector(Answers(good=""), one_rank)
    for wants in (False, True):
        made.factory = replace(made.factory, wants_routing=wants)
        asked = made.requests_of_this_rank(made.source.draw(3))
        assert [request.hints.wants_routing for request in asked] == [wants] * 3


def test_without_dynamic_sampling_every_group_counts(one_rank: ParallelGroups) -> None:
    answers = Answers(good="b")
    made = Collector(
        source(), RequestFactory(SamplingParams(), 100), answers, one_rank, ExpectedLengths(),
        prompts_per_step=3, group_size=2, max_failed_share=0.5,
    )  # fmt: skip
    tasks, found = step(made)
    assert tasks == "abc"
    assert answers.draws == ["abc"]
    assert made.commit(found) == {}
