"""Evaluation numbers from rewards made by hand."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_rl.environments.results import is_right
from megatron_rl.environments.wire import ServedEnvironment
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.evaluation import Evaluator, powers_of_two_up_to
from megatron_rl.rollout.prompt_source import RequestFactory
from megatron_rl.rollout.rollouter import RolloutResult
from megatron_rl.run.base import warn_of_range
from megatron_rl.types import Grade, Request, RolloutGroup, SamplingParams, SourcedTask, Task
from tests.support.rollouts import drawn, graded_group, group_of, sample_of, told

FACTORY = RequestFactory(SamplingParams(max_new_tokens=8), max_sequence_length=16)


class FixedRollouter:
    """Answers the requests with groups made beforehand, and remembers what it was asked."""

    def __init__(self, groups: Sequence[RolloutGroup], cancelled: bool = False) -> None:
        self.result = None if cancelled else RolloutResult(dict(enumerate(groups)), EngineStatistics(), 0.0, 0.0)
        self.asked: list[tuple[list[Request], int, int]] = []

    def run(self, requests: Sequence[Request], seed: int, policy_version: int) -> RolloutResult | None:
        self.asked.append((list(requests), seed, policy_version))
        return self.result


def evaluator(
    groups: ParallelGroups, rollouter: FixedRollouter, tasks: Sequence[tuple[str, str]], samples: int
) -> Evaluator:
    draws = [SourcedTask(environment, Task(task_id, "p"), prompt_ids=(1, 2)) for environment, task_id in tasks]
    counts = {environment: samples for environment, _ in tasks}
    return Evaluator(rollouter, draws, counts, FACTORY, seed=7, groups=groups)


def test_numbers(one_rank: ParallelGroups) -> None:
    """Two tasks, four samples each, and one greedy answer each."""
    cut = ["stop", "length", "stop", "length"]
    groups = [
        # One of four is right: pass@1 1/4, pass@2 1 - C(3,2)/C(4,2) = 1/2, pass@4 1.
        graded_group([1.0, -1.0, -1.0, -1.0], lengths=[1, 2, 3, 4], finish_reasons=["stop", "length", "stop", "stop"]),
        graded_group([1.0], lengths=[9]),
        # Two of the three that were graded: pass@1 2/3, pass@2 1 - C(1,2)/C(3,2) = 1; four there are not.
        graded_group([1.0, None, 1.0, -1.0], lengths=[2, 50, 2, 2], finish_reasons=cut),
        graded_group([-1.0], lengths=[9]),
    ]
    metrics = evaluator(one_rank, FixedRollouter(groups), [("toy", "0"), ("toy", "1")], samples=4).evaluate(3).metrics
    assert metrics == pytest.approx(
        {
            "val/toy/reward": (1 - 3 + 2 - 1) / 7,
            "val/toy/response_length": (1 + 2 + 3 + 4 + 2 + 2 + 2) / 7,
            "val/toy/truncated": 2 / 7,
            "val/toy/greedy": 1 / 2,
            "val/toy/num_tasks": 2.0,
            "val/toy/failed_grades": 1.0,
            "val/toy/pass@1": (1 / 4 + 2 / 3) / 2,
            "val/toy/pass@1_ci95": 0.3330097,  # Wilson's of 5.72 draws
            "val/toy/pass@2": (1 / 2 + 1) / 2,
            "val/toy/pass@4": 1.0,  # of three graded samples one is right
        }
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # Right in all that was graded, and never right: pass@2 was that of the second task alone.
        ([[1, None], [0, 0]], {1: 0.5, 2: 0.5}),
        ([[1, None, None, None], [1, 0, 0, 0]], {1: 0.625, 2: 0.75, 4: 1.0}),
        ([[0, None, None, None], [1, 0, 0, 0]], {1: 0.125, 2: 0.25, 4: 0.5}),
        ([[1, 0, None, None], [0, 0, 0, 0], [None] * 4], {1: 0.25, 2: 0.5, 4: 0.5}),
        ([[1, 0, None, None], [0, 0, 1, None]], {1: 5 / 12, 2: 5 / 6}),  # of four samples nobody knows
        ([[None] * 4, [0, 1, 1, 1]], {1: 0.75, 2: 1.0, 4: 1.0}),
    ],
)
def test_pass_at_k_is_of_the_same_tasks_for_every_k(
    one_rank: ParallelGroups, rewards: list[list[float | None]], expected: dict[int, float]
) -> None:
    """Where grades failed, each k left out other tasks, so that pass@k could fall as k grew."""
    groups = [group for task in rewards for group in (graded_group(task), graded_group([None]))]
    tasks = [("toy", str(number)) for number in range(len(rewards))]
    metrics = evaluator(one_rank, FixedRollouter(groups), tasks, samples=len(rewards[0])).evaluate(0).metrics
    found = {name: value for name, value in metrics.items() if "pass@" in name and "ci95" not in name}
    assert found == pytest.approx({f"val/toy/pass@{k}": value for k, value in expected.items()})


def test_a_sample_of_several_sequences_is_one_answer_of_their_length(one_rank: ParallelGroups) -> None:
    """4 tokens and a branch of 2 that was cut, against one of 2: means of samples, not of sequences."""
    tree = sample_of(1.0, ([1], drawn([1, 2, 3, 4])), ([1, 1], drawn([3, 4], finish_reason="length")))
    groups = [group_of(tree, sample_of(0.0, ([1], drawn([1, 2])))), graded_group([1.0], lengths=[1])]
    one = evaluator(one_rank, FixedRollouter(groups), [("toy", "0")], samples=2)
    metrics = one.evaluate(0).metrics
    expected = {"pass@1": 0.5, "pass@2": 1.0, "reward": 0.5, "response_length": 4.0, "truncated": 0.5}
    assert {name: metrics[f"val/toy/{name}"] for name in expected} == expected
    assert one.expected_lengths.state_dict()["toy"]["tasks"] == {"0": 3.0}, "(6 + 2 + 1) / 3"


def test_a_failed_greedy_grade_is_left_out(one_rank: ParallelGroups) -> None:
    groups = [graded_group([1.0]), graded_group([None]), graded_group([1.0]), graded_group([1.0])]
    metrics = evaluator(one_rank, FixedRollouter(groups), [("toy", "0"), ("toy", "1")], samples=1).evaluate(0).metrics
    assert metrics["val/toy/greedy"] == 1.0


def test_nothing_graded_at_all(one_rank: ParallelGroups) -> None:
    """A reward, a length or a greedy accuracy of 0 would be numbers that nobody has measured."""
    groups = [graded_group([None, None]), graded_group([None])]
    result = evaluator(one_rank, FixedRollouter(groups), [("toy", "0")], samples=2).evaluate(0)
    assert result.metrics == {"val/toy/failed_grades": 2.0, "val/toy/num_tasks": 1.0}
    assert result.ungraded == ("toy",)


def test_one_task_has_no_interval(one_rank: ParallelGroups) -> None:
    groups = [graded_group([1.0, 0.0]), graded_group([None])]
    result = evaluator(one_rank, FixedRollouter(groups), [("toy", "0")], samples=2).evaluate(0)
    assert (result.metrics["val/toy/pass@1"], result.ungraded) == (0.5, ())
    assert "val/toy/pass@1_ci95" not in result.metrics


def test_environments_are_kept_apart(one_rank: ParallelGroups) -> None:
    groups = [
        graded_group([1.0], environment="b"), graded_group([1.0], environment="b"),
        graded_group([0.0], environment="a"), graded_group([0.0], environment="a"),
    ]  # fmt: skip
    metrics = evaluator(one_rank, FixedRollouter(groups), [("b", "0"), ("a", "0")], samples=1).evaluate(0).metrics
    assert (metrics["val/a/pass@1"], metrics["val/b/pass@1"]) == (0.0, 1.0)
    assert (metrics["val/a/greedy"], metrics["val/b/greedy"]) == (0.0, 1.0)


def test_environments_may_want_other_numbers_of_samples(one_rank: ParallelGroups) -> None:
    """pass@k goes as far as each has samples."""
    groups = [
        graded_group([1.0, 0.0], environment="b"), graded_group([1.0], environment="b"),
        graded_group([0.0], environment="a"), graded_group([0.0], environment="a"),
    ]  # fmt: skip
    rollouter = FixedRollouter(groups)
    draws = [SourcedTask(name, Task("0", "p"), prompt_ids=(1, 2)) for name in "ba"]
    metrics = Evaluator(rollouter, draws, {"a": 1, "b": 2}, FACTORY, seed=7, groups=one_rank).evaluate(0).metrics
    assert [request.num_samples for request in rollouter.asked[0][0]] == [2, 1, 1, 1]
    assert (metrics["val/b/pass@1"], metrics["val/b/pass@2"], metrics["val/a/pass@1"]) == (0.5, 1.0, 0.0)
    assert "val/a/pass@2" not in metrics
    assert metrics["val/a/failed_grades"] == metrics["val/b/failed_grades"] == 0


def test_every_evaluation_asks_the_same(one_rank: ParallelGroups) -> None:
    """Each task sampled, then greedily; with the same random numbers every time."""
    groups = [graded_group([1.0, 0.0]), graded_group([1.0])]
    rollouter = FixedRollouter(groups)
    evaluation = evaluator(one_rank, rollouter, [("toy", "0")], samples=2)
    evaluation.evaluate(policy_version=1)
    evaluation.evaluate(policy_version=2)
    (first, first_seed, _), (second, second_seed, version) = rollouter.asked
    assert first == second and first_seed == second_seed == 7 and version == 2
    assert [(r.num_samples, r.sampling.greedy, r.index) for r in first] == [(2, False, 0), (1, True, 1)]


def test_tasks_are_dealt_by_the_lengths_of_the_evaluation_before(one_rank: ParallelGroups) -> None:
    """Means 40 / 5 = 8, 5 / 5 = 1 and 10 / 5 = 2; five samples and two prompts of two tokens: 44, 9 and 14."""
    lengths = [([8, 8, 8, 6], [10]), ([1, 1, 1, 1], [1]), ([2, 2, 2, 3], [1])]
    groups = [graded_group([1.0] * len(one), lengths=one) for pair in lengths for one in pair]
    evaluation = evaluator(one_rank, FixedRollouter(groups), [("toy", str(i)) for i in range(3)], samples=4)
    assert [r.index for r in evaluation.requests(0, 2)] == [0, 1, 4, 5], "nothing is known yet: in turn"
    evaluation.evaluate(0)
    assert evaluation.expected_lengths.state_dict()["toy"]["tasks"] == {"0": 8.0, "1": 1.0, "2": 2.0}
    for rank, indices in enumerate(([0, 1], [2, 3, 4, 5])):
        assert [r.index for r in evaluation.requests(rank, 2)] == indices


def test_its_answers_come_with_it(one_rank: ParallelGroups) -> None:
    groups = (graded_group([1.0, 0.0]), graded_group([1.0]))
    assert evaluator(one_rank, FixedRollouter(groups), [("toy", "0")], samples=2).evaluate(0).groups == groups


@pytest.mark.parametrize(
    ("reward", "verdict", "right"),
    [
        (1.0, "", True),
        (-1.0, "", False),
        (0.0, "correct", True),  # as long as can be: the punishment takes the whole reward
        (0.5, "wrong", False),  # a format reward
        (0.5, "no_answer", False),
        (0.5, "unparsable", False),
        (0.5, "timeout", False),
        (0.5, "plausible", False),  # an environment's own word says nothing here
        (1.0, "plausible", True),
        (0.7 + 0.2 + 0.1, "", True),  # 0.9999999999999999
        (0.999, "", False),
        (1.1, "", None),  # beyond the highest: then it is not the highest
        (-2.0, "", None),
    ],
)
def test_the_verdict_decides_before_the_reward(reward: float, verdict: str, right: bool | None) -> None:
    assert is_right(Grade(reward, status=verdict), (-1.0, 1.0)) is right


def test_what_is_right_is_the_highest_reward_unless_the_environment_says_it() -> None:
    assert is_right(Grade(0.0), (-1.0, 0.0)) is True
    assert is_right(Grade(-1.0), (-1.0, 0.0)) is False
    assert is_right(Grade(7.0), (0.0, None)) is None
    assert is_right(Grade(7.0, status="correct"), (0.0, None)) is True
    assert is_right(Grade(0.25, correct=True), (0.0, 1.0)) is True


@pytest.mark.parametrize(
    ("rewards", "reward_range", "right"),
    [
        ([0.1, 0.3, 0.9, 0.5], (0.0, 1.0), 0.0),  # partial credit is no right answer
        ([0.0, 0.0, 0.0, -1.0], (-1.0, 0.0), 0.75),
        ([0.0, 0.0, 0.0, -1.0], (0.0, 1.0), None),  # the range is not theirs
        ([1.0, 1.0, 0.0, -1.0], (0.0, 1.0), 0.5),  # it is but for a punishment
        ([10.0, 5.0, 1.0, 0.0], (0.0, 1.0), None),
        ([10.0, 5.0, 1.0, 0.0], (0.0, None), None),
    ],
)
def test_right_is_the_highest_reward(
    one_rank: ParallelGroups, rewards: list[float], reward_range: tuple[float, float | None], right: float | None
) -> None:
    """Where nobody can tell there is the mean reward, and no share of right answers of any kind."""
    groups = [
        replace(group, rollouts=tuple(replace(one, grade=told(one.grade, reward_range)) for one in group.rollouts))
        for group in (answering(rewards, list("abcd")), graded_group(rewards[:1]))
    ]
    metrics = evaluator(one_rank, FixedRollouter(groups), [("toy", "0")], samples=4).evaluate(0).metrics
    assert metrics.get("val/toy/pass@1") == right
    assert metrics["val/toy/reward"] == sum(rewards) / 4
    known = {name.removeprefix("val/toy/") for name in metrics}
    of_right = {"pass@1", "pass@2", "pass@4", "greedy", "maj@k"}
    assert known & of_right == (set() if right is None else of_right)


def test_rewards_that_are_not_0_or_1_leave_the_results_alone(one_rank: ParallelGroups) -> None:
    """A right answer punished to 0, a wrong one with a format reward: pass@1 1/2, greedy 0."""
    sampled, greedy = graded_group([0.0, 0.5]), graded_group([0.5])
    verdicts = [("correct", "4"), ("wrong", "5")]
    rollouts = [
        replace(rollout, grade=told(replace(rollout.grade, status=verdict, extracted=answer)))
        for rollout, (verdict, answer) in zip(sampled.rollouts, verdicts, strict=True)
    ]
    wrong = replace(greedy.rollouts[0], grade=told(replace(greedy.rollouts[0].grade, status="wrong")))
    groups = [replace(sampled, rollouts=tuple(rollouts)), replace(greedy, rollouts=(wrong,))]
    metrics = evaluator(one_rank, FixedRollouter(groups), [("toy", "0")], samples=2).evaluate(0).metrics
    assert (metrics["val/toy/pass@1"], metrics["val/toy/greedy"], metrics["val/toy/maj@k"]) == (0.5, 0.0, 1.0)
    assert metrics["val/toy/reward"] == 0.25


@pytest.mark.parametrize(
    ("reward_range", "measures", "warned"),
    [
        ((0.0, 1.0), ("reward",), True),
        ((0.0, None), ("reward",), False),  # as it says
        ((0.0, 1.0), ("reward", "pass@1"), False),
        ((0.0, 1.0), ("num_tasks",), False),  # nothing was graded, which is told otherwise
    ],
)
def test_rewards_outside_the_range_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, reward_range: tuple[float, float | None],
    measures: Sequence[str], warned: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    served = ServedEnvironment("toy", 1.0, False, 1, reward_range=reward_range)
    warn_of_range(served, {f"val/toy/{measure}": 1.0 for measure in measures})
    assert ("toy has no pass@k: it gave rewards outside 0 to 1" in caplog.text) == warned


def answering(rewards: Sequence[float | None], answers: Sequence[str | None]) -> RolloutGroup:
    """A group whose grader extracted ``answers``."""
    group = graded_group(rewards)
    rollouts = [
        replace(rollout, grade=replace(rollout.grade, extracted=answer))
        for rollout, answer in zip(group.rollouts, answers, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_a_task_that_nobody_answered_counts_against_the_majority(one_rank: ParallelGroups) -> None:
    """Of four tasks one is solved, one is voted wrong, one has no answer and one no grade: 1 of 3."""
    sampled = [
        answering([1.0, 1.0, 0.0], ["4", "4", "5"]),
        answering([1.0, 0.0, 0.0], ["4", "5", "5"]),
        answering([0.0, 0.0, 0.0], [None, None, None]),
        answering([None, None, None], [None, None, None]),
    ]
    groups = [group for one in sampled for group in (one, graded_group([0.0]))]
    tasks = [("toy", str(number)) for number in range(4)]
    metrics = evaluator(one_rank, FixedRollouter(groups), tasks, samples=3).evaluate(0).metrics
    assert metrics["val/toy/maj@k"] == pytest.approx(1 / 3)
    assert metrics["val/toy/pass@1"] == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)


def test_without_extracted_answers_there_is_no_majority(one_rank: ParallelGroups) -> None:
    rollouter = FixedRollouter([answering([1.0, 0.0], [None, None]), graded_group([1.0])])
    metrics = evaluator(one_rank, rollouter, [("toy", "0")], samples=2).evaluate(0).metrics
    assert "val/toy/maj@k" not in metrics


def test_a_cancelled_evaluation_has_no_numbers(one_rank: ParallelGroups) -> None:
    rollouter = FixedRollouter([], cancelled=True)
    assert evaluator(one_rank, rollouter, [("toy", "0")], samples=1).evaluate(0) is None


@pytest.mark.parametrize(("count", "expected"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_the_k_of_pass_at_k(count: int, expected: list[int]) -> None:
    assert powers_of_two_up_to(count) == expected
