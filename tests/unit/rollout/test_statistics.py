"""Numbers about a step's rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.inference import EngineStatistics
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.statistics import Failures, engine_metrics, environment_metrics, failures_of, rollout_metrics
from megatron_rl.types import GradeResult, RolloutGroup
from tests.support.rollouts import graded_group


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
    metrics = rollout_metrics(groups, one_rank.data_group)
    assert metrics == pytest.approx(
        {
            "prompt_length/mean": 2.0,
            "response_length/mean": 3.0,
            "response_length/max": 6.0,
            "response_length/min": 1.0,
            "response_length/clip_ratio": 0.25,
            # sample 0 has -0.5 a token, sample 1 has -1.5: (2 + 3) * -0.5 + (6 + 1) * -1.5 over 12 tokens
            "rollout/logprob_mean": -13.0 / 12,
            "rollout/turns_mean": 1.0,
            "perf/total_num_tokens": 8.0 + 12.0,
            "perf/generated_tokens": 12.0,
        }
    )


def test_grader_metrics_are_means_over_those_that_report_them(one_rank: ParallelGroups) -> None:
    first = with_metrics(graded_group([0.0, 1.0]), {"steps": 2.0}, {"steps": 4.0, "format": 1.0})
    second = with_metrics(graded_group([0.0], environment="other"), {"steps": 7.0})
    metrics = rollout_metrics([first, second], one_rank.data_group)
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
    assert engine_metrics(statistics, one_rank.data_group) == {
        "engine/prefill_tokens": 30.0,
        "engine/reused_share": 0.25,
        "engine/preemptions": 2.0,
        "engine/recomputed_tokens": 7.0,
        "engine/useful_rows_share": 0.7,  # the first token of a completion comes from the prefill
    }
    assert set(engine_metrics(EngineStatistics(), one_rank.data_group).values()) == {0.0}


def test_failures_are_counted_by_code(one_rank: ParallelGroups) -> None:
    group = graded_group([None, None, 1.0])
    rollouts = list(group.rollouts)
    rollouts[1] = replace(rollouts[1], grade=GradeResult("error", code="worker_died", message="killed"))
    failures = failures_of([group, replace(group, rollouts=tuple(rollouts))], one_rank.data_group)
    assert failures.counts == {"timeout": 3, "worker_died": 1}
    assert failures.example == "killed"
    assert environment_metrics({"restarts": 2, "busy_waits": 0}, failures) == {
        "environment/busy_waits": 0.0,
        "environment/restarts": 2.0,
        "training/failed_grades/timeout": 3.0,
        "training/failed_grades/worker_died": 1.0,
    }


def test_nothing_was_rolled_out(one_rank: ParallelGroups) -> None:
    assert rollout_metrics([], one_rank.data_group) == {}
    assert failures_of([], one_rank.data_group) == Failures({}, "")
