"""Which groups a step of partial rollouts must generate, which replica does, and what the next step finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.partial import (
    PartialGoal,
    PartialRollouts,
    UnfinishedGroups,
    gathered,
    goal_of,
    oldest_version,
)
from megatron_rl.rollout.prompt_source import ExpectedLengths, PromptSource, RequestFactory, TaskPool
from megatron_rl.rollout.statistics import staleness_metrics
from megatron_rl.types import Completed, Completion, Request, SamplingParams, SourcedTask, Task
from tests.support.rollouts import graded_group

FACTORY = RequestFactory(SamplingParams(max_new_tokens=8), 16)


def sample(tokens: int, version: int, ends: bool = False, earlier: tuple[tuple[int, int], ...] = ()) -> Completion:
    return Completion((5,) * tokens, (-0.5,) * tokens, "stop" if ends else None, version, older=earlier)


def request(index: int, *begun: Completion, task: str = "a") -> Request:
    source = SourcedTask("toy", Task(task, "p"), prompt_ids=(1, 2))
    return replace(FACTORY.request(source, 2, index), so_far=begun)


def begun(version: int | None, index: int = 0) -> Request:
    return request(index) if version is None else request(index, sample(3, version), sample(0, version))


def places(versions: Sequence[int | None], now: int, lag: int, wanted: int = 2, finishes: bool = True) -> set[int]:
    asked = [begun(version, index) for index, version in enumerate(versions)]
    return PartialRollouts(at_once=len(asked), max_staleness=lag, finishes=finishes).due(asked, now, wanted)


def test_the_oldest_token_says_how_old_a_group_is() -> None:
    mixed = request(0, sample(6, 7, earlier=((4, 2), (5, 3))), sample(4, 5, ends=True))
    assert oldest_version(mixed, 9) == 4
    assert oldest_version(request(0), 9) == oldest_version(request(0, sample(0, 3), sample(0, 3)), 9) == 9
    assert not mixed.is_generated
    assert not request(0).is_generated
    assert request(0, sample(6, 7, ends=True), sample(1, 4, ends=True)).is_generated


@pytest.mark.parametrize(
    ("versions", "lag", "due"),
    [
        # Now is version 5, and a step takes two groups.
        ([None, None, None, None], 1, set()),
        ([4, 4, None, None], 1, {0, 1}),  # in the next step they would be two updates old
        ([4, 4, None, None], 2, set()),  # the next step can still take both
        ([4, 4, 4, None], 2, {0}),  # the next step can take two of three
        ([None, 4, 4, 4, 4], 2, {1, 2}),
        ([4, 3, 4, 4, None, None], 2, {0, 1}),  # one now, and of all four two have to go now
        ([3, 4, 4, None, None, None], 3, set()),
        ([2, 4, 4, 4, 4, None], 3, {0}),  # two steps for four
        ([2, 4, 4, 4, 4, 4], 3, {0}),  # any two of six leave four
        ([4, 4, 4, None], 1, {0, 1}),  # one too many, of a run that had more in flight: a step takes no more than two
    ],
)
def test_what_would_be_too_old_is_due(versions: list[int | None], lag: int, due: set[int]) -> None:
    assert places(versions, now=5, lag=lag) == due
    assert places(versions, now=5, lag=lag, finishes=False) == set()


@pytest.mark.parametrize(("wanted", "lag", "at_once"), [(2, 1, 4), (2, 3, 8), (3, 2, 9), (1, 4, 3), (4, 2, 7)])
def test_nothing_grows_too_old_whoever_is_first(wanted: int, lag: int, at_once: int) -> None:
    """Steps that take what is due and then the youngest: at most ``wanted`` are due, and none is ever too old."""
    settings, flying = PartialRollouts(at_once, lag, finishes=True), []
    for version in range(30):
        flying += [version] * (at_once - len(flying))
        due = settings.due([begun(born, index) for index, born in enumerate(flying)], version, wanted)
        assert len(due) <= wanted
        rest = [index for index in range(len(flying)) if index not in due]
        taken = due | set(rest[len(rest) - (wanted - len(due)) :])
        assert len(taken) == wanted
        assert all(version - flying[index] <= lag for index in taken)
        flying = [born for index, born in enumerate(flying) if index not in taken]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_replicas_share_what_is_wanted(num_ranks: int) -> None:
    asked = [begun(4 if index < 3 else None, index) for index in range(11)]
    goals = [goal_of(asked, {0, 2}, 7, ExpectedLengths(), rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(r.index for goal in goals for r in goal.requests) == list(range(11))
    assert sorted(index for goal in goals for index in goal.due) == [0, 2]
    assert sum(goal.others for goal in goals) == 5
    for goal in goals:
        assert goal.due <= {r.index for r in goal.requests}
        assert 0 <= goal.others <= len(goal.requests) - len(goal.due)


class Interrupted:
    """An engine with these requests under way."""

    def __init__(self, *unfinished: Request) -> None:
        self.unfinished = list(unfinished)
        self.statistics = EngineStatistics()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.unfinished)

    def interrupt(self) -> list[Request]:
        left, self.unfinished = self.unfinished, []
        return left


def done(index: int) -> Completed:
    return request(index), (sample(2, 5, ends=True), sample(3, 5, ends=True))


def test_a_share_takes_the_first_and_waits_for_what_is_due() -> None:
    engine = Interrupted(request(1), request(4))
    goal = PartialGoal([], due={1}, others=2)
    assert [r.index for r, _ in goal.take([done(3), done(0)], engine)] == [0, 3]
    assert goal.take([done(2)], engine) == []
    assert engine.has_unfinished
    assert [r.index for r in goal.unfinished] == [2]
    assert goal.unfinished[0].is_generated
    engine.unfinished = [request(4)]
    assert [r.index for r, _ in goal.take([done(1)], engine)] == [1]
    assert not engine.has_unfinished
    assert [r.index for r in goal.unfinished] == [2, 4]


def test_a_share_of_nothing_stops_at_once() -> None:
    engine, goal = Interrupted(request(1)), PartialGoal([], due=set(), others=0)
    assert goal.take([], engine) == []
    assert [r.index for r in goal.unfinished] == [1]


def source(*tasks: str) -> PromptSource:
    pool = TaskPool("toy", [Task(task, "p") for task in tasks], 1.0)
    return PromptSource([pool], lambda *_: (1, 2), 8, seed=1)


def unfinished(groups: ParallelGroups, *requests: Request) -> UnfinishedGroups:
    """As a checkpoint gives it back."""
    goal = PartialGoal([], due=set(), others=0, unfinished=list(requests))
    _, records = gathered(goal, [], groups.rollout_group)
    kept, resumed = UnfinishedGroups(), UnfinishedGroups()
    kept.records = records
    resumed.load_state_dict(kept.state_dict())
    return resumed


def test_groups_come_back_in_the_order_in_which_they_were_drawn(one_rank: ParallelGroups) -> None:
    older = sample(5, 7, earlier=((6, 2),))
    kept = unfinished(one_rank, request(4, older, sample(2, 6, ends=True), task="b"), request(1, task="c"))
    first, second = kept.requests(source("a", "b", "c"), FACTORY, 2)
    assert (first.source.task.id, first.index, first.so_far) == ("c", 0, ())
    assert (second.source.task.id, second.index) == ("b", 1)
    assert second.so_far == (older, sample(2, 6, ends=True))


@pytest.mark.parametrize(
    ("tasks", "group_size", "longest"), [("a", 2, 8), ("ab", 3, 8), ("ab", 2, 5)], ids=["task", "group", "length"]
)
def test_what_no_longer_fits_is_dropped(
    one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture, tasks: str, group_size: int, longest: int
) -> None:
    """Five tokens of a sample that goes on are too many for a limit of five."""
    kept = unfinished(one_rank, request(0, sample(5, 7), sample(1, 7), task="b"))
    factory = RequestFactory(SamplingParams(max_new_tokens=longest), 16)
    assert kept.requests(source(*tasks), factory, group_size) == []
    assert "1 of 1 unfinished groups are dropped" in caplog.text


def test_finished_samples_wait_with_their_experts(one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture) -> None:
    """A run without --rl-router-replay does not read them, and one with it needs them."""
    wanting = replace(FACTORY, wants_routing=True)
    experts = torch.tensor([[[0, 3]], [[2, 1]], [[255, 255]]], dtype=torch.uint8)
    known = unfinished(one_rank, request(0, replace(sample(1, 7, ends=True), routing=experts), sample(2, 7)))
    ((found,), (plain,)) = (known.requests(source("a"), factory, 2) for factory in (wanting, FACTORY))
    assert torch.equal(found.so_far[0].routing, experts)
    assert found.hints.wants_routing
    assert [each.routing for each in (found.so_far[1], *plain.so_far)] == [None] * 3
    without = request(0, sample(1, 7, ends=True), sample(2, 7))
    unknown = unfinished(one_rank, without, request(1, sample(2, 7), sample(0, 7)))
    (found,) = unknown.requests(source("a"), wanting, 2)
    assert [each.finish_reason for each in found.so_far] == [None, None]
    assert "1 of 2 unfinished groups are dropped" in caplog.text


def test_lag_of_tokens_by_hand(one_rank: ParallelGroups) -> None:
    """Version 7 now. Of 7 tokens two are of version 4, one of version 6."""
    group = graded_group([0.0, 1.0], lengths=[3, 4])
    first, second = group.rollouts
    drawn = [
        replace(first.completion, policy_version=7, older=((4, 2),)),
        replace(second.completion, policy_version=7, older=((6, 1),)),
    ]
    rollouts = tuple(replace(r, completion=c) for r, c in zip(group.rollouts, drawn, strict=True))
    assert staleness_metrics([replace(group, rollouts=rollouts)], 7, one_rank.rollout_group) == {
        "rollout/stale_token_share": pytest.approx(3 / 7),
        "rollout/token_lag_mean": pytest.approx((3 + 3 + 1) / 3),
        "rollout/token_lag_max": 3.0,
    }
    assert staleness_metrics([], 7, one_rank.rollout_group)["rollout/token_lag_max"] == 0.0
