"""Numbers about a step's rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.errors import EnvironmentFault
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.statistics import (
    Failures,
    engine_metrics,
    environment_metrics,
    failures_of,
    idle_metrics,
    lengths_and_seconds,
    refuse_failures,
    reward_by_environment,
    rollout_metrics,
    staleness_metrics,
)
from megatron_rl.types import Grade, RolloutGroup
from tests.support.rollouts import drawn, graded_group, group_of, sample_of


def with_metrics(group: RolloutGroup, *metrics: dict[str, float]) -> RolloutGroup:
    """The group with ``metrics`` in its grades."""
    rollouts = [
        replace(rollout, grade=replace(rollout.grade, metrics=values))
        for rollout, values in zip(group.rollouts, metrics, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_lengths_and_logprobs(one_rank: ParallelGroups) -> None:
    groups = [
        graded_group([0.0, 1.0], prompt_ids=(1, 2, 3), lengths=[2, 6], finish_reasons=["stop", "length"]),
        graded_group([0.0, 1.0], prompt_ids=(1,), lengths=[3, 1]),
    ]
    metrics = rollout_metrics(groups, one_rank.rollout_group)
    assert metrics == pytest.approx(
        {
            "prompt_length/mean": 2.0,
            "response_length/mean": 3.0,
            "response_length/max": 6.0,
            "response_length/min": 1.0,
            "response_length/clip_ratio": 0.25,
            "response_length/repeated_share": (2 / 3) / 4,  # 11 six times: two of its three 4-grams
            # sample 0 has -0.5 a token, sample 1 has -1.5: (2 + 3) * -0.5 + (6 + 1) * -1.5 over 12 tokens
            "rollout/logprob_mean": -13.0 / 12,
            "rollout/turns_mean": 1.0,
            "rollout/sequences_mean": 1.0,
            "perf/total_num_tokens": 8.0 + 12.0,
            "perf/generated_tokens": 12.0,
        }
    )


def branched() -> RolloutGroup:
    """A sample of two sequences, 3 + 6 and 5 + 2 tokens, two of them read; and one of 1 + 2, the group's prompt."""
    first = drawn([1, 2, 3, 4, 5, 6], environment_spans=((2, 4),))
    tree = sample_of(1.0, ([7, 8, 9], first), ([7, 8, 9, 1, 2], drawn([3, 4], -2.0, "length")))
    return group_of(tree, replace(tree, prompt_ids=None, completion=drawn([1, 2], -0.5), branches=()))


def test_a_sample_counts_all_its_sequences(one_rank: ParallelGroups) -> None:
    """Written are 4 + 2 and 2; calls 2 + 1 and 1."""
    assert rollout_metrics([branched()], one_rank.rollout_group) == {
        "prompt_length/mean": 2.0,
        "response_length/mean": 4.0,
        "response_length/max": 6.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.5,
        "response_length/repeated_share": 0.0,
        "rollout/logprob_mean": (-6.0 - 4.0 - 1.0) / 8,  # the helper gives read tokens one, too
        "rollout/turns_mean": 2.0,
        "rollout/sequences_mean": 1.5,
        "perf/total_num_tokens": 9.0 + 7.0 + 3.0,
        "perf/generated_tokens": 8.0,
    }


@pytest.mark.parametrize(
    ("ids", "spans", "share"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], (), 2 / 7),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], ((5, 5),), 0.0),  # a call of each turn
        ([1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9, 6], ((5, 11),), 0.0),  # what a tool returned
        ([1, 2, 3], (), 0.0),
    ],
)
def test_repeats_are_counted_within_a_turn(one_rank: ParallelGroups, ids, spans, share) -> None:
    group = group_of(sample_of(1.0, ([1], drawn(ids, environment_spans=spans))))
    found = rollout_metrics([group], one_rank.rollout_group)["response_length/repeated_share"]
    assert found == pytest.approx(share)


def test_what_is_expected_of_a_sample_is_all_that_it_generates(one_rank: ParallelGroups) -> None:
    """Completions of 6 + 2 tokens and of 2: the mean is 5. What a branch's prompt repeats costs nothing."""
    assert lengths_and_seconds({0: branched()}, 1.0, 1, one_rank.rollout_group) == ([5.0], [1.0])


def test_tokens_of_branches_have_an_age(one_rank: ParallelGroups) -> None:
    """Of 8 tokens written the branch's 2 are of version 1."""
    group = branched()
    tree, plain = group.rollouts
    (branch,) = tree.branches
    newer = replace(branch, completion=replace(branch.completion, policy_version=1))
    changed = replace(group, rollouts=(replace(tree, branches=(newer,)), plain))
    assert staleness_metrics([changed], 1, one_rank.rollout_group) == {
        "rollout/stale_token_share": 0.75, "rollout/token_lag_mean": 1.0, "rollout/token_lag_max": 1.0,
    }  # fmt: skip


def test_tokens_that_were_only_read_have_no_age(one_rank: ParallelGroups) -> None:
    """Written: 2 by version 1, 1 by version 2, 3 by version 3; an environment's 7 and 5 are of 1, 2 and 3, too."""
    said = drawn(range(18), environment_spans=((2, 9), (10, 15)), older=((1, 6), (2, 12)))
    group = group_of(sample_of(1.0, ([1], replace(said, policy_version=3))))
    assert staleness_metrics([group], 3, one_rank.rollout_group) == {
        "rollout/stale_token_share": 0.5, "rollout/token_lag_mean": pytest.approx(5 / 3), "rollout/token_lag_max": 2.0,
    }  # fmt: skip
    read_by_the_oldest = replace(said, environment_spans=((0, 6),), policy_version=3)
    aged = staleness_metrics([group_of(sample_of(1.0, ([1], read_by_the_oldest)))], 3, one_rank.rollout_group)
    assert aged == {
        "rollout/stale_token_share": 0.5, "rollout/token_lag_mean": 1.0, "rollout/token_lag_max": 1.0,
    }  # fmt: skip


def test_rewards_and_signal_of_each_environment(one_rank: ParallelGroups) -> None:
    """Of `toy` samples of 0, 1, 1 and none; `silent` was graded not once."""
    groups = [
        graded_group([0.0, 1.0], environment="toy"), graded_group([1.0, None], environment="toy"),
        graded_group([0.5, 0.5], environment="other"), graded_group([None], environment="silent"),
    ]  # fmt: skip
    metrics = reward_by_environment(groups, [True, False, False, False], one_rank.rollout_group)
    assert metrics == {
        "reward/other/mean": 0.5, "reward/other/signal_share": 0.0,
        "reward/silent/signal_share": 0.0,
        "reward/toy/mean": pytest.approx(2 / 3), "reward/toy/signal_share": 0.5,
    }  # fmt: skip
    assert reward_by_environment([], [], one_rank.rollout_group) == {}


def test_grader_metrics_are_means_over_those_that_report_them(one_rank: ParallelGroups) -> None:
    first = with_metrics(graded_group([0.0, 1.0]), {"steps": 2.0}, {"steps": 4.0, "format": 1.0})
    second = with_metrics(graded_group([0.0], environment="other"), {"steps": 7.0})
    metrics = rollout_metrics([first, second], one_rank.rollout_group)
    assert {name: value for name, value in metrics.items() if name.startswith("grade/")} == {
        "grade/toy/steps": 3.0,
        "grade/toy/format": 1.0,
        "grade/other/steps": 7.0,
    }


def test_what_the_engine_did(one_rank: ParallelGroups) -> None:
    statistics = EngineStatistics(
        decode_rows=40, prefill_tokens=30, reused_tokens=10, preemptions=2, recomputed_tokens=7, generated_tokens=32,
        completions=4,
    )  # fmt: skip
    assert engine_metrics(statistics, one_rank.rollout_group) == {
        "engine/prefill_tokens": 30.0,
        "engine/reused_share": 0.25,
        "engine/preemptions": 2.0,
        "engine/recomputed_tokens": 7.0,
        "engine/useful_rows_share": 0.7,  # the first token of a completion comes from the prefill
    }
    assert set(engine_metrics(EngineStatistics(), one_rank.rollout_group).values()) == {0.0}


def test_failures_are_counted_by_code(one_rank: ParallelGroups) -> None:
    group = graded_group([None, None, 1.0])
    rollouts = list(group.rollouts)
    rollouts[1] = replace(rollouts[1], grade=Grade(None, code="worker_died", message="killed"))
    failures = failures_of([group, replace(group, rollouts=tuple(rollouts))], one_rank.rollout_group)
    assert failures.counts == {"timeout": 3, "worker_died": 1}
    assert failures.example == "killed"
    assert environment_metrics({"restarts": 2, "busy_waits": 0}, failures) == {
        "environment/busy_waits": 0.0,
        "environment/restarts": 2.0,
        "training/failed_grades/timeout": 3.0,
        "training/failed_grades/worker_died": 1.0,
    }


def test_nothing_was_rolled_out(one_rank: ParallelGroups) -> None:
    assert rollout_metrics([], one_rank.rollout_group) == {}
    assert failures_of([], one_rank.rollout_group) == Failures({}, "")


def test_lengths_go_by_the_number_of_their_group(one_rank: ParallelGroups) -> None:
    """What the model read in a conversation counts: it takes its time, too."""
    talk = graded_group([0.0, 1.0], lengths=[4, 9])
    read = replace(talk.rollouts[1].completion, environment_spans=((2, 5),))
    talk = replace(talk, rollouts=(talk.rollouts[0], replace(talk.rollouts[1], completion=read)))
    answered = {0: graded_group([0.0, 1.0], lengths=[1, 2]), 2: talk}
    assert lengths_and_seconds(answered, 1.25, 3, one_rank.rollout_group) == ([1.5, 0.0, 6.5], [1.25])


def test_too_many_failures_stop_the_run() -> None:
    failures = Failures({"timeout": 1}, "10 s")
    refuse_failures(failures, samples=4, largest_share=0.25)
    with pytest.raises(EnvironmentFault, match=r"1 of 4 grades failed \(timeout 1\), more than the 20%.*them: 10 s"):
        refuse_failures(failures, samples=4, largest_share=0.2)


def test_a_rank_is_idle_while_the_slowest_generates() -> None:
    """4 s, 3 s and 1 s: idle for 0, 1 and 3 of 4 s."""
    assert idle_metrics([4.0, 3.0, 1.0]) == pytest.approx(
        {
            "perf/rollout_idle_share": 1 / 3,
            "perf/rollout_idle_share/rank_0": 0.0,
            "perf/rollout_idle_share/rank_1": 0.25,
            "perf/rollout_idle_share/rank_2": 0.75,
        }
    )
    assert idle_metrics([4.0]) == {}, "one rank waits for nobody"
    assert idle_metrics([2.0] * 33) == {"perf/rollout_idle_share": 0.0}, "too many for a row"
