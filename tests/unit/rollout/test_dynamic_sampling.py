"""When a step has enough groups: the first ones that count, whoever is finished first."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from megatron_rl.algorithms.filters import accuracy, signal
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.dynamic_sampling import COUNTS, IDLE, OPEN, Quota
from megatron_rl.rollout.filtering import counts_in
from megatron_rl.types import RolloutGroup
from tests.support.ranks import run_ranks
from tests.support.rollouts import graded_group, told

GOOD, EQUAL = graded_group([0.0, 1.0]), graded_group([1.0, 1.0])


def met(quota: Quota, finished: dict[int, RolloutGroup], within: float = 30.0) -> bool:
    """A sum takes a moment to arrive."""
    end = time.monotonic() + within
    while not (found := quota.is_met(finished, idle=True)) and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.fixture
def quota(one_rank: ParallelGroups) -> Quota:
    return Quota(2, range(3, 8), signal.Filter(), one_rank)


def test_two_that_count_are_not_enough_while_an_earlier_one_is_open(quota: Quota) -> None:
    """Group 3 might count: with 4 and 5 the step would prefer whoever answers shortly."""
    assert not met(quota, {4: GOOD, 5: GOOD}, within=0.2)
    assert met(quota, {3: EQUAL, 4: GOOD, 5: GOOD})
    assert quota.states == [IDLE, COUNTS, COUNTS, OPEN, OPEN]
    assert quota.num_needed == 3


def test_all_finished_and_too_few(quota: Quota) -> None:
    finished = {number: EQUAL for number in range(3, 8)} | {6: GOOD}
    assert met(quota, finished)
    assert quota.states == [IDLE, IDLE, IDLE, COUNTS, IDLE]
    assert quota.num_needed == 5


def test_what_comes_later_does_not_matter(quota: Quota) -> None:
    assert met(quota, {3: GOOD, 4: GOOD, 5: EQUAL, 7: GOOD})
    assert quota.num_needed == 2


def test_failed_grades_do_not_make_a_group_count(quota: Quota) -> None:
    finished = dict.fromkeys(range(3, 8), graded_group([None, 1.0])) | {4: graded_group([None, None])}
    assert met(quota, finished)
    assert set(quota.states) == {IDLE}


@pytest.mark.parametrize(
    ("graded", "by_rewards", "by_verdicts"),
    [
        ([(-1.0, "wrong"), (-1.5, "wrong")], True, False),  # all wrong, one of them too long
        ([(1.0, "correct"), (0.5, "correct")], True, False),
        ([(1.0, "correct"), (-1.0, "no_answer")], True, True),
        ([(1.0, ""), (0.0, "")], True, True),  # without a verdict the highest reward is a right answer
        ([(-1.0, "wrong"), (-1.0, "wrong")], False, False),
        ([(0.75, ""), (0.5, "")], True, False),  # neither is the highest
        ([(2.0, ""), (0.5, "")], True, True),  # nobody can tell of a reward beyond the highest: by the rewards
    ],
)
def test_a_filter_asks_for_rewards_or_for_verdicts(
    graded: list[tuple[float, str]], by_rewards: bool, by_verdicts: bool
) -> None:
    group = graded_group([reward for reward, _ in graded])
    rollouts = [
        replace(rollout, grade=told(replace(rollout.grade, status=status)))
        for rollout, (_, status) in zip(group.rollouts, graded, strict=True)
    ]
    group = replace(group, rollouts=tuple(rollouts))
    assert counts_in(signal.Filter(), group) is by_rewards
    assert counts_in(accuracy.Filter(), group) is by_verdicts
    assert counts_in(lambda rewards: bool(rewards.sum() < 0), group) is (sum(r for r, _ in graded) < 0)


@pytest.fixture(scope="module")
def replicas() -> list[dict]:
    return run_ranks("tests.distributed.quota_programs:replicas", 2)


def test_replicas_agree_without_waiting_for_each_other(replicas: list[dict]) -> None:
    """Rank 0 has groups 0, 2, 4, of which 2 does not count; rank 1 has 1, 3, 5 and takes longer."""
    for report in replicas:
        assert report["agreed"] == [[COUNTS, COUNTS, IDLE, COUNTS], 4]
    assert replicas[0]["looks"] > 2 * replicas[1]["looks"], "rank 0 was held up until rank 1 looked again"


def test_one_that_leaves_ends_the_others(replicas: list[dict]) -> None:
    assert [report["left"] for report in replicas] == [True, True]


def test_the_ranks_of_one_copy_stop_at_the_same_look() -> None:
    first, second = run_ranks("tests.distributed.quota_programs:copy", 2)
    assert first == second
    assert first["states"] == [COUNTS, COUNTS]
    assert first["look"] % 8 == 0
