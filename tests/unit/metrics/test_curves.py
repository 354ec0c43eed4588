"""The curves of a report: which metrics share a chart, and few enough points."""

from __future__ import annotations

from megatron_rl.metrics.curves import MAX_POINTS, build_curves, select_indices


def test_phases_are_stacked_with_the_rest_of_the_step() -> None:
    rows = [
        {
            "step": 1,
            "timing_s/update_actor": 2.0,
            "timing_s/gen": 3.0,
            "timing_s/gen/prefill": 1.0,
            "timing_s/step": 6.0,
        },
        {"step": 2, "timing_s/gen": 3.0, "timing_s/step": 3.0},
    ]
    (chart,) = build_curves(rows)
    assert chart["kind"] == "stack"
    assert {one["label"]: one["values"] for one in chart["series"]} == {
        "gen": [3.0, 3.0],
        "update_actor": [2.0, 0.0],
        "other": [1.0, 0.0],
    }


def test_the_idle_share_has_a_line_for_every_rank() -> None:
    share = "perf/rollout_idle_share"
    rows = [
        {"step": 1, share: 0.25, f"{share}/rank_0": 0.5, f"{share}/rank_1": 0.0},
        {"step": 2, share: 0.1, f"{share}/rank_0": 0.0, f"{share}/rank_1": 0.2},
    ]
    (chart,) = build_curves(rows)
    assert chart["title"] == "Idle share of the generation"
    assert {one["label"]: one["values"] for one in chart["series"]} == {
        "mean of the ranks": [0.25, 0.1], "rank 0": [0.5, 0.0], "rank 1": [0.0, 0.2],
    }  # fmt: skip


def test_long_curves_are_downsampled_keeping_ends_and_spikes() -> None:
    rows = [{"step": step, "actor/grad_norm": 100.0 if step == 777 else 1.0} for step in range(1, 5001)]
    series = build_curves(rows)[0]["series"][0]
    assert len(series["steps"]) <= MAX_POINTS
    assert (series["steps"][0], series["steps"][-1]) == (1, 5000)
    assert max(series["values"]) == 100.0
    assert series["steps"] == sorted(set(series["steps"]))


def test_short_curves_are_whole() -> None:
    assert select_indices([1.0] * 500, 500) == list(range(500))


def test_missing_values_do_not_break_downsampling() -> None:
    kept = select_indices([None] * 1000, 10)
    assert kept == [0, 999]


def test_measures_of_another_scale_have_charts_of_their_own() -> None:
    rows = [{"step": 1, "val/a/pass@1": 0.98, "val/a/truncated": 0.0, "val/a/response_length": 900.0,
             "val/a/reward": -0.5, "val/b/pass@1": 0.5, "val/b/reward": 0.5}]  # fmt: skip
    lines = {chart["title"]: [one["label"] for one in chart["series"]] for chart in build_curves(rows)}
    assert lines == {
        "Held-out: a": ["pass@1"], "Held-out: b": ["pass@1"], "Response length": ["held-out a"],
        "Share of answers cut at the limit": ["held-out a"], "Held-out reward": ["held-out a"],
    }  # fmt: skip
