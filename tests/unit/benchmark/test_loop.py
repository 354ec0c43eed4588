"""Shares by phase, from rows written by hand."""

from __future__ import annotations

import pytest

from tools.benchmark.loop import shares_by_phase, throughput

ROWS = [
    {"step": 0, "time": "2026-01-01T00:00:02.000+00:00", "timing_s/eval": 2.0},
    {
        "step": 1,
        "time": "2026-01-01T00:00:07.000+00:00",
        "timing_s/step": 4.5,
        "timing_s/gen": 2.0,
        "timing_s/reward": 0.5,
        "timing_s/advantages": 0.25,
        "timing_s/old_log_prob": 0.5,
        "timing_s/update_actor": 1.5,
        "perf/generated_tokens": 300.0,
        "perf/total_num_tokens": 400.0,
        "training/signal_share": 0.5,
    },
    {"step": 2, "time": "2026-01-01T00:00:08.000+00:00", "timing_s/save": 0.75},
]


def test_phases_add_up_to_the_time_between_first_and_last_row() -> None:
    assert shares_by_phase(ROWS) == pytest.approx(
        {
            "gen": 1.5,
            "reward wait": 0.5,
            "advantages": 0.25,
            "update": 2.0,
            "eval": 2.0,
            "save": 0.75,
            "other": 1.0,  # of 8 seconds: 6 between the rows, 2 of evaluation before the first
        }
    )


def test_trained_tokens_leave_out_groups_without_signal() -> None:
    # 300 generated in 2 s; half of 400 trained in 2 s
    assert throughput(ROWS) == {"rollout_tokens_per_second": 150.0, "training_tokens_per_second": 100.0}
